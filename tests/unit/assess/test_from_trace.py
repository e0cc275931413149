"""An access log or a trace as an observed fleet."""

from __future__ import annotations

import numpy as np
import pytest

from penstock.assess.from_trace import observed_of_trace, with_prefixes, within
from penstock.core.errors import ConfigError
from penstock.workload.access_log import AccessLogFacts, Answered
from penstock.workload.traces import Trace, TraceFormat, TraceRequest

START_S = 1_795_953_600.0


def trace(*rows):
    """A log of (arrival, prompt, answer, e2e, TTFT, cached, worker)."""
    requests = tuple(
        TraceRequest(row[0], row[1], row[2], None, line) for line, row in enumerate(rows, start=1)
    )
    answered = {line: Answered(*row[3:]) for line, row in enumerate(rows, start=1)}
    facts = AccessLogFacts("nginx", START_S, answered, {"turned away with 429 or 503": 2}, {})
    return Trace("access.jsonl", TraceFormat.ACCESS_LOG, "0" * 64, requests, {}, log=facts)


def test_a_log_says_what_was_served_by_whom_and_from_the_cache():
    """Times to first token, gaps between tokens, hit rate and workers by minute, and what was left out."""
    found = observed_of_trace(
        trace((0.0, 1024, 11, 1.5, 0.5, 512, "a"), (70.0, 1024, 1, 0.7, 0.7, 0, "b"), (1000.0, 10, 5, 1.0, 0.2, 0, "a")),
        model="llama", replicas=None, start_s=0.0,
    )  # fmt: skip
    assert (found.start_s, found.steps, found.requests) == (START_S, 17, 3.0)
    assert found.arrivals[:2].tolist() == [1.0, 1.0]
    assert found.ttft.mean() == pytest.approx((0.5 + 0.7 + 0.2) / 3)
    assert found.gaps.mean() == pytest.approx((1.0 + 0.8) / (10 + 4))
    assert found.hit_rate[:2].tolist() == [0.5, 0.0]
    assert found.replicas[:5].tolist() == [2.0, 2.0, 2.0, 1.0, pytest.approx(float("nan"), nan_ok=True)]
    assert "2 requests turned away with 429 or 503 are left out" in found.notes


def test_without_workers_in_the_log_their_number_is_needed():
    """And a log without times to first token has nothing to be compared with."""
    log = trace((0.0, 100, 10, 1.0, None, None, None))
    with pytest.raises(ConfigError, match="--replicas: required with --access-log"):
        observed_of_trace(log, model="llama", replicas=None, start_s=0.0)
    found = observed_of_trace(log, model="llama", replicas=3, start_s=0.0)
    assert found.replicas.tolist() == [3.0]
    assert (found.ttft, found.gaps, found.hit_rate) == (None, None, None)
    assert any("no time to first token" in note for note in found.notes)


def test_prompts_share_what_was_cached():
    """A request of which half was cached shares half of its blocks with others."""
    rows = [(float(at), 4096, 10, 1.0, 0.1, 2048, "a") for at in range(200)]
    ids = [set(request.block_ids) for request in with_prefixes(trace(*rows)).requests]
    everything = [each for own in ids for each in own]
    shared = [sum(everything.count(each) > 1 for each in own) for own in ids[:20]]
    assert np.mean(shared) == pytest.approx(4, abs=0.5)


def test_a_window_keeps_its_own_requests_from_its_beginning():
    """Times count from the window."""
    log = trace(*[(60.0 * at, 100, 10, 1.0, 0.1, None, "a") for at in range(10)])
    observed = observed_of_trace(log, model="llama", replicas=1, start_s=0.0)
    assert [each.arrival_s for each in within(log, observed, observed.cut(3, 5)).requests] == [0.0, 60.0]
