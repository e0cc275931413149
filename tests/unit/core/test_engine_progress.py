"""When an engine that answers its health check hangs all the same."""

import pytest

from penstock.core.exposition import parse_samples
from penstock.core.worker_metrics import (
    NO_PROGRESS_KNOWN,
    PROGRESS_NAMES,
    RankReading,
    read_engine,
    running,
)

PAGE = """
vllm:prompt_tokens_total{engine="0"} 10
vllm:generation_tokens_total{engine="0"} {tokens}
vllm:kv_cache_usage_perc{engine="0"} 0.25
vllm:num_requests_running{engine="0"} {running}
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} {waiting}
vllm:num_requests_waiting_by_reason{engine="0",reason="deferred"} {deferred}
"""
LIMIT_S = 10.0


def page(*, tokens=5, running=1, waiting=0, deferred=0):
    """Return the reading of one page."""
    values = {"tokens": tokens, "running": running, "waiting": waiting, "deferred": deferred}
    text = PAGE
    for name, value in values.items():
        text = text.replace(f"{{{name}}}", str(value))
    return read_engine(parse_samples(text, PROGRESS_NAMES))


def stalled_at(readings, *, inflight=0, compile_s=0.0, working=frozenset()):
    """Return the times, seconds, at which an engine is stalled, one reading a second."""
    progress, found = NO_PROGRESS_KNOWN, []
    for now_s, reading in enumerate(readings):
        requests = inflight if isinstance(inflight, int) else inflight[now_s]
        progress = progress.after(
            reading,
            float(now_s),
            inflight_requests=requests,
            limit_s=LIMIT_S,
            compile_s=compile_s,
            is_working=now_s in working,
        )
        if progress.is_stalled:
            found.append(now_s)
    return found


def test_an_engine_with_running_requests_and_no_token_hangs_after_the_limit():
    """From the last change on; arrivals that only wait are not a sign of life."""
    assert stalled_at([page(waiting=second) for second in range(13)]) == [10, 11, 12]


@pytest.mark.parametrize(
    "readings",
    [
        [page(tokens=second) for second in range(40)],
        [page(running=0)] * 40,
        [page(tokens=second // 9) for second in range(40)],
        [{"0": RankReading((), 1.0, is_deferred=False)}] * 40,
    ],
)
def test_one_that_moves_or_has_nothing_to_do_does_not_hang(readings):
    """A token within the limit is enough; a page that says nothing of tokens is not held against a worker."""
    assert stalled_at(readings) == []


def test_a_core_that_hung_before_it_saw_a_request_is_found_by_what_the_caller_sent():
    """Its gauges read 0; a request that waits for another worker's KV is that worker's affair."""
    assert stalled_at([page(running=0)] * 12, inflight=1) == [10, 11]
    assert stalled_at([page(running=0, deferred=1)] * 40, inflight=1) == []


def test_an_engine_that_stalled_gets_on_as_soon_as_its_figures_move():
    """SIGCONT: the next token ends it."""
    assert stalled_at([page()] * 12 + [page(tokens=6)]) == [10, 11]


def test_one_that_lost_its_requests_is_tried_again_after_twice_the_limit():
    """Its clients are gone, so nothing could move: it takes a request again, and gets the whole limit for it."""
    requests = [1] * 11 + [0] * 15 + [1] * 12
    assert stalled_at([page(running=0)] * 38, inflight=requests) == [*range(10, 20), 35, 36, 37]


def test_a_number_that_is_none_is_left_out():
    """NaN is unequal to itself, which would look like life."""
    text = "vllm:kv_cache_usage_perc NaN\nvllm:num_requests_running 2\nvllm:prompt_tokens_total 7\n"
    read = read_engine(parse_samples(text, PROGRESS_NAMES))
    assert (sorted(read[""].figures), running(read)) == ([2.0, 7.0], 2.0)


RANKS = """
vllm:generation_tokens_total{engine="0",model_name="m"} {tokens}
vllm:generation_tokens_total{engine="1",model_name="m"} 900
vllm:num_requests_running{engine="0",model_name="m"} {running}
vllm:num_requests_running{engine="1",model_name="m"} {other_running}
"""


def ranks(*, tokens, running=1, other_running=3):
    """Return the reading of two data-parallel ranks, of which the second makes no token."""
    values = {"{tokens}": tokens, "{running}": running, "{other_running}": other_running}
    text = RANKS
    for name, value in values.items():
        text = text.replace(name, str(value))
    return read_engine(parse_samples(text, PROGRESS_NAMES))


def test_one_data_parallel_rank_that_stands_still_with_requests_hangs():
    """The figures of the other rank are not a sign of its life; the problem names it."""
    assert stalled_at([ranks(tokens=second) for second in range(13)]) == [10, 11, 12]
    progress = NO_PROGRESS_KNOWN
    for now_s in (0.0, 10.0):
        progress = progress.after(ranks(tokens=now_s), now_s, inflight_requests=4, limit_s=LIMIT_S)
    assert (
        progress.problem(LIMIT_S)
        == "its engine hangs: requests, but no token of data-parallel rank 1 for 10 s (real)"
    )


def test_a_rank_without_requests_does_not_hang_beside_one_that_works():
    """What the caller has sent is at the other one, also while that is between two requests."""
    readings = [ranks(tokens=second, running=second % 2, other_running=0) for second in range(40)]
    assert stalled_at(readings, inflight=2) == []


def test_an_engine_that_compiles_hangs_no_sooner_than_its_limit_after_that():
    """Its children compute and it makes no token, for so long as a start may take; spinning for ever hangs all the same."""
    assert stalled_at([page()] * 31, compile_s=25.0, working=range(21)) == [30]
    assert stalled_at([page()] * 37, compile_s=25.0, working=range(60)) == [35, 36]
    assert stalled_at([page()] * 11, compile_s=25.0) == [10]
