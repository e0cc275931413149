"""The traffic of a load run as a workload: what came, when, and which prefixes it shared. Pure."""

from __future__ import annotations

from penstock.core.errors import ConfigError
from penstock.workload.results import RESULTS_FILE, LoadRun
from penstock.workload.traces import TraceFormat, TraceRequest


def recorded_traffic(load: LoadRun) -> tuple[TraceRequest, ...]:
    """Return the requests of a run in the order in which they were sent, rejected and failed ones included.

    An answer is as long as it was, and where it did not come, as long as it was asked for.

    Raises:
        ConfigError: the log does not hold what came; the message says what is missing.
    """
    _check(load)
    requests = [
        TraceRequest(
            arrival_s=max(0.0, result.sent_s),
            input_tokens=result.trace_input_tokens,
            output_tokens=max(1, result.output_tokens or result.trace_output_tokens),
            block_ids=result.block_ids,
            line=result.line,
            tier=result.tier,
        )
        for result in load.results
    ]
    return tuple(sorted(requests, key=lambda request: (request.arrival_s, request.line)))


def _check(load: LoadRun) -> None:
    summary = load.summary
    if not load.results:
        raise ConfigError(f"{RESULTS_FILE} holds no request")
    if summary["is_partial"]:
        raise ConfigError("the load run was stopped early, and what was in flight then is in no log")
    concurrency = summary["settings"]["concurrency"]
    if concurrency is not None:
        raise ConfigError(
            f"the load run had at most {concurrency} requests in flight, so that its arrivals waited for its"
            " answers and another fleet would have met others; leave out --concurrency"
        )
    has_ids = any(result.block_ids is not None for result in load.results)
    if summary["trace"].get("format") == TraceFormat.MOONCAKE and not has_ids:
        raise ConfigError(
            f"{RESULTS_FILE} lacks block_ids, the prefixes that prompts share; run `penstock load` again, this"
            " version records them"
        )
