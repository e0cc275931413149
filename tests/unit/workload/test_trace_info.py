"""What a trace asks for, worked out by hand."""

import pytest

from penstock.workload.trace_info import WINDOWS, Lengths, describe_trace, ideal_hits
from penstock.workload.traces import Trace, TraceFormat, TraceRequest


def trace_of(*requests):
    """A trace of (arrival, prompt, answer, ids)."""
    made = tuple(TraceRequest(*each, line) for line, each in enumerate(requests, start=1))
    return Trace("t", TraceFormat.MOONCAKE, "0", made, {})


def test_rate_lengths_and_reuse():
    """Four requests in 30 s; the second repeats the first's block, the fourth the complete third but a token."""
    info = describe_trace(
        trace_of(
            (0.0, 600, 10, (1, 2)), (10.0, 1000, 20, (1, 3)), (20.0, 512, 30, (4,)), (30.0, 512, 40, (4,))
        )
    )

    assert (info.requests, info.span_s, info.rate_rps, info.gap_cv) == (4, 30.0, 0.1, 0.0)
    assert info.peak_rps == pytest.approx(WINDOWS / 30)
    assert info.prompts == Lengths(2624, 656.0, 512, 1000, 1000, 1000)
    assert info.answers.mean == 25
    assert info.reuse.tokens_fraction == pytest.approx((512 + 511) / 2624)
    assert info.reuse.requests_fraction == 0.5
    assert info.reuse.distinct_tokens == 2624 - 1023
    assert [each.reused_fraction for each in info.windows if each.rps] == [0, 0.512, 0, 511 / 512]


def test_what_is_not_known_is_not_zero():
    """Without ids no reuse, with one time of arrival no rate."""
    info = describe_trace(trace_of((5.0, 600, 10, None), (5.0, 600, 10, None)))

    assert (info.reuse, info.rate_rps, info.gap_cv, info.peak_rps, info.windows) == (
        None,
        None,
        None,
        None,
        (),
    )


def test_a_block_that_a_prompt_ended_in_counts_by_its_tokens():
    """300 tokens of it are known, then 512: a conversation's next turn does not find what was not there."""
    turns = trace_of((0.0, 300, 1, (7,)), (1.0, 700, 1, (7, 8)), (2.0, 900, 1, (7, 8)))

    assert ideal_hits(turns.requests) == [0, 300, 700]
