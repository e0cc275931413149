"""Which of a client's trace headers continue."""

import pytest

from penstock.core.tracing import trace_context

PARENT = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize(
    ("parent", "state", "expected"),
    [
        (PARENT, None, ["parent"]),
        (PARENT, b"rojo=00f067aa0ba902b7, congo=t61rcWkgMzE", ["parent", "state"]),
        (PARENT, b"0vendor@sys=a b,,x=1", ["parent", "state"]),
        (b"01" + PARENT[2:] + b"-later", b"a=1", ["parent", "state"]),
        (None, b"a=1", []),
        (b"00-1-2-01", b"a=1", []),
        (b"ff" + PARENT[2:], None, []),
        (PARENT.replace(b"0af7651916cd43dd8448eb211c80319c", b"0" * 32), None, []),
        (PARENT + b"-" + b"x" * 10_000, None, []),
        (PARENT.upper(), None, []),
        (PARENT, b"no member", ["parent"]),
        (PARENT, b"a=1,a=2", ["parent"]),
        (PARENT, b"a=\xff", ["parent"]),
        (PARENT, b"a=" + b"x" * 10_000, ["parent"]),
        (PARENT, b",".join(b"k%d=1" % number for number in range(33)), ["parent"]),
    ],
)
def test_only_a_well_formed_trace_context_goes_on(parent, state, expected):
    """What is none would be relayed and logged by all behind the router, whatever its length."""
    headers = {b"traceparent": parent, b"tracestate": state}
    found = trace_context({name: value for name, value in headers.items() if value is not None})
    assert [name.decode().removeprefix("trace") for name, _ in found] == expected
    assert all(headers[name] == value for name, value in found)
