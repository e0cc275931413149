"""When a deleted pod's process gets SIGTERM."""

from __future__ import annotations

import io
import time
import urllib.error
import urllib.request

import pytest

from penstock.api.runtimes import SHIPPED, RuntimeTraits
from penstock_operator.resources.pod import lifecycle

IDLE = "vllm:num_requests_running{m=1} 0.0\nvllm:kv_cache_usage_perc 0.0\nother 5\n# HELP vllm:num_requests_running 3\n"
BUSY = "vllm:num_requests_running{m=1} 2.0\n"
WAITING = "vllm:num_requests_waiting{m=1} 1.0\n"
HOLDING = "vllm:kv_cache_usage_perc 0.25\n"
INFLIGHT = "dynamo_component_inflight_requests{e=1} 1\n"
REFUSED = urllib.error.URLError(ConnectionRefusedError(111, "refused"))
FAILING = urllib.error.HTTPError("u", 500, "no", None, None)
SILENT = TimeoutError("slow")


@pytest.fixture
def hook(monkeypatch):
    """Run the hook's program on a row of answers; return how many it used and how long it slept in all."""

    def run(*answers, keeps_leases=True):
        found = lifecycle(
            finishes_requests=False,
            grace_s=900,
            keeps_leases=keeps_leases,
            traits=SHIPPED["dynamo"],
        )
        (_, _, program) = found["preStop"]["exec"]["command"]
        rest = list(answers)
        slept = []

        def urlopen(url, timeout):
            assert (url, timeout) == ("http://127.0.0.1:8000/metrics", 10)
            answer = rest.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return io.BytesIO(answer.encode())

        monkeypatch.setattr(time, "sleep", slept.append)
        monkeypatch.setattr(urllib.request, "urlopen", urlopen)
        exec(program, {})
        return len(answers) - len(rest), sum(slept)

    return run


@pytest.mark.parametrize(
    ("answers", "used", "slept"),
    [
        ((IDLE, IDLE, BUSY), 2, 7),
        ((BUSY, WAITING, HOLDING, INFLIGHT, IDLE, IDLE, BUSY), 6, 11),
        ((IDLE, BUSY, IDLE, IDLE, BUSY), 4, 9),
        ((IDLE, FAILING, IDLE, SILENT, IDLE, IDLE, BUSY), 6, 11),
        ((BUSY, REFUSED, BUSY), 2, 6),
    ],
    ids=["idle", "busy in every way", "busy between", "no answer is not idle", "no server"],
)
def test_worker_gets_sigterm_only_when_idle(hook, answers, used, slept):
    """Two checks in a row find nothing running, waiting or held, after routers had time to turn away."""
    assert hook(*answers) == (used, slept)


def test_blocks_kept_for_the_next_turn_are_not_waited_for(hook):
    """A decode worker's are a cache; its requests are waited for all the same."""
    assert hook(HOLDING, HOLDING, BUSY, keeps_leases=False) == (2, 7)
    assert hook(BUSY, HOLDING, HOLDING, BUSY, keeps_leases=False) == (3, 8)


@pytest.mark.parametrize(("grace_s", "expected"), [(900, 5), (6, 5), (3, 2), (2, 1)])
def test_own_processes_only_settle(grace_s, expected):
    """They finish their requests at SIGTERM, so the hook waits for routers alone, within the grace period."""
    found = lifecycle(finishes_requests=True, grace_s=grace_s, traits=SHIPPED["simulated"])
    assert found == {"preStop": {"sleep": {"seconds": expected}}}


@pytest.mark.parametrize(("gauge", "is_waited_for"), [(None, False), ("acme_requests", True)])
def test_a_worker_leaves_by_the_gauge_of_its_own_runtime(gauge, is_waited_for):
    """One of another distribution may count its requests by any name."""
    found = lifecycle(
        finishes_requests=False, grace_s=900, traits=RuntimeTraits(image="", request_gauge=gauge)
    )

    assert ("acme_requests" in found["preStop"]["exec"]["command"][2]) is is_waited_for
