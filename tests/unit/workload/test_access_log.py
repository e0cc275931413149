"""Access logs of gateways as traces: what each format says, what is left out, and what is refused."""

import json

import pytest

from penstock.api import Tier
from penstock.core.errors import ConfigError
from penstock.workload.access_log import Estimate, LogEstimates
from penstock.workload.traces import TraceFormat, load_access_log, load_trace

PENSTOCK = {
    "ts": 1795953763.389, "request_id": "a", "endpoint": "chat_completions", "status": 200, "e2e_s": 0.389, "stream": True,
    "prompt_tokens": 311, "cached_tokens": 128, "output_tokens": 29, "ttft_s": 0.03, "worker": "w-0", "error": None,
}  # fmt: skip
ENVOY = {
    "start_time": "2026-11-29T12:02:43.000Z", "method": "POST", "x-envoy-origin-path": "/v1/chat/completions",
    "response_code": "200", "duration": "389", "bytes_received": "1244", "bytes_sent": "7250",
    "upstream_host": "10.0.0.7:8000", "gen_ai.usage.input_tokens": "311", "gen_ai.usage.output_tokens": 29,
}  # fmt: skip
NGINX = {
    "msec": "1795953763.389", "request_uri": "/v1/chat/completions?x=1", "status": "200", "request_time": "0.389",
    "request_length": "1244", "body_bytes_sent": "7250", "upstream_addr": "10.0.0.6:8000, 10.0.0.7:8000",
}  # fmt: skip
BYTES = LogEstimates(Estimate.parse("bytes/4"), Estimate.parse("bytes/250"))


@pytest.fixture
def log(tmp_path):
    """Write rows as JSON lines, and return the file."""

    def write(*rows):
        path = tmp_path / "access.jsonl"
        path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows))
        return path

    return write


def test_the_routers_log_says_the_tier_of_a_request(log):
    """It is missing where tiers are disabled, and a value that is not a tier is not taken for one."""
    found = load_access_log(
        log(*({**PENSTOCK, "tier": tier} for tier in ("background", "gold", ["premium"])), PENSTOCK), BYTES
    )
    assert [each.tier for each in found.requests] == [Tier.BACKGROUND, None, None, None]


@pytest.mark.parametrize(
    ("row", "name", "worker"),
    [
        (PENSTOCK, "Penstock's router", "w-0"),
        (ENVOY, "Envoy", "10.0.0.7:8000"),
        (NGINX, "nginx", "10.0.0.7:8000"),
    ],
)
def test_each_format_says_the_same_of_the_same_request(log, row, name, worker):
    """The arrival is the end less the duration where only the end is logged; bytes become tokens where counts lack."""
    found = load_access_log(log(row), BYTES)
    assert found.format is TraceFormat.ACCESS_LOG
    assert found.log.format == name
    assert found.log.start_s == pytest.approx(1795953763.0)
    (request,) = found.requests
    assert (request.arrival_s, request.input_tokens, request.output_tokens) == (0.0, 311, 29)
    answered = found.log.answered[1]
    assert (answered.e2e_s, answered.worker) == (pytest.approx(0.389), worker)
    assert (answered.ttft_s, answered.cached_tokens) == ((0.03, 128) if row is PENSTOCK else (None, None))
    assert bool(found.log.estimated) is (row is NGINX)


def test_requests_are_in_order_of_arrival_whatever_ended_first(log):
    """A long request is logged after shorter ones that came later."""
    later, longer = PENSTOCK | {"ts": 102.0, "e2e_s": 1.0}, PENSTOCK | {"ts": 110.0, "e2e_s": 10.0}
    found = load_access_log(log(later, longer), LogEstimates())
    assert [(each.line, each.arrival_s) for each in found.requests] == [(2, 0.0), (1, 1.0)]
    assert found.log.start_s == 100.0
    assert load_trace(log(later, longer)).requests == found.requests


def test_what_was_not_served_and_what_no_model_answers_is_left_out_and_counted(log):
    """Lines that cannot be read are counted as well; a log of nothing else is refused."""
    others = [
        PENSTOCK | {"endpoint": "models"}, PENSTOCK | {"status": 503, "output_tokens": 0}, PENSTOCK | {"status": 499},
    ]  # fmt: skip
    found = load_access_log(log(PENSTOCK, *others, "{broken"), LogEstimates())
    assert len(found.requests) == 1
    assert found.log.left_out == {
        "for other paths than a model's": 1,
        "turned away with 429 or 503": 1,
        "failed or left by the client": 1,
        "in lines that cannot be read": 1,
    }
    with pytest.raises(ConfigError, match="only requests that failed"):
        load_access_log(log(*others), LogEstimates())


def test_a_log_without_token_counts_is_refused_with_what_is_missing(log):
    """One request without an answer count is enough: counts of only some requests would be a lighter load."""
    with pytest.raises(ConfigError) as refused:
        load_access_log(log(ENVOY, ENVOY | {"gen_ai.usage.output_tokens": "-"}), LogEstimates())
    said = str(refused.value)
    assert said.startswith("--access-log ")
    assert "Envoy has 1 without generated tokens, of 2 served requests" in said
    assert "--log-output-tokens" in said
    with pytest.raises(ConfigError, match=r"1 without prompt tokens and 1 without generated tokens"):
        load_access_log(log(NGINX), LogEstimates())
    fixed = load_access_log(log(NGINX), LogEstimates(Estimate.parse("800"), Estimate.parse("120")))
    assert (fixed.requests[0].input_tokens, fixed.requests[0].output_tokens) == (800, 120)
    assert fixed.log.estimated == {"prompt tokens: 800": 1, "generated tokens: 120": 1}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('10.0.0.1 - - [29/Nov/2026:12:02:43 +0000] "POST /v1/chat/completions HTTP/1.1" 200 7250', "without durations"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}', "is a trace"),
        ("<html>", "is none of"),
    ],
)  # fmt: skip
def test_another_file_is_refused(log, line, said):
    """The message says what it is instead."""
    with pytest.raises(ConfigError, match=f"--access-log .*{said}"):
        load_access_log(log(line), LogEstimates())


def test_a_time_in_any_of_the_usual_forms_is_read(log):
    """ISO 8601, nginx's own form and seconds."""
    row = {key: value for key, value in NGINX.items() if key != "msec"} | {"request_time": "0"}
    for key, value in (
        ("time_iso8601", "2026-11-29T13:02:43+01:00"),
        ("time_local", "29/Nov/2026:12:02:43 +0000"),
        ("time", 1795953763),
    ):
        assert load_access_log(log(row | {key: value}), BYTES).log.start_s == 1795953763.0
    assert load_access_log(log(row | {"time": "noon"}, NGINX), BYTES).log.left_out == {
        "in lines that cannot be read": 1
    }


@pytest.mark.parametrize("text", ["0", "-3", "bytes/0", "bytes/", "chars/4", "bytes/inf"])
def test_an_estimate_must_be_a_number_or_a_ratio(text):
    """Everything else is a usage error."""
    with pytest.raises(ValueError):
        Estimate.parse(text)
