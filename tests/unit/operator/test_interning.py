"""What saves memory."""

from __future__ import annotations

import copy
import json

from hypothesis import given
from hypothesis import strategies as st

from penstock_operator.trim import InterningPool

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 10**6) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
)


@given(st.lists(JSON, max_size=12), st.integers(1, 20))
def test_everything_stays_what_it_was(values, limit):
    """Also types (1, 1.0 and true) and the order of keys; the input is not changed, however often all is forgotten."""
    shares = InterningPool(limit)
    before = copy.deepcopy(values)
    made = [shares.intern(each) for each in values]
    assert json.dumps(made) == json.dumps(before) == json.dumps(values)


def test_equal_parts_are_one():
    """Maps, lists and strings of two objects that differ elsewhere."""
    shares = InterningPool()
    one, other = (
        shares.intern(json.loads(json.dumps({"name": name, "probe": {"path": "/health", "ports": [8000]}})))
        for name in ("a", "b")
    )
    assert one != other
    assert one["probe"] is other["probe"]
