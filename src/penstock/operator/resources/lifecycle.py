"""What a pod does between its deletion and SIGTERM.

For whoever deletes a pod without asking the operator first: a rollout, an eviction, ``kubectl delete``.
Routers see a terminating endpoint within the settle time and send nothing new. Penstock's own processes
then finish their requests at SIGTERM; vLLM and Dynamo abort theirs, so they get SIGTERM only when idle.
"""

from __future__ import annotations

from typing import Any

from penstock.kube.objects.names import WORKER_PORT

SETTLE_S = 5
"""Time for every router to see that the pod is leaving; chosen, several times a watch's delay."""

_REQUEST_SERIES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "dynamo_component_inflight_requests",
)
"""All zero: nothing runs or waits."""

_LEASE_SERIES = "vllm:kv_cache_usage_perc"
"""Above zero without requests on a prefill worker: blocks under a lease, which decode has still to read."""

_WAIT_UNTIL_IDLE = f"""\
import time, urllib.request
SERIES = %r
time.sleep({SETTLE_S})
idle = 0
while idle < 2:
    try:
        page = urllib.request.urlopen("http://127.0.0.1:{WORKER_PORT}/metrics", timeout=10).read().decode()
    except Exception as problem:
        if isinstance(getattr(problem, "reason", None), ConnectionRefusedError):
            break
        idle = 0
    else:
        busy = [line for line in page.splitlines() if line.startswith(SERIES) and float(line.split()[-1]) > 0]
        idle = 0 if busy else idle + 1
    time.sleep(1)
"""
"""Ends when two looks a second apart find the worker idle, or when nobody listens any more.

Runs in images that bring Python but not Penstock; the pod's grace period bounds it.
"""


def lifecycle(*, finishes_requests: bool, grace_s: int, keeps_leases: bool = False) -> dict[str, Any]:
    """Return the container's lifecycle hooks.

    Args:
        finishes_requests: Whether the process finishes its requests at SIGTERM.
        grace_s: The pod's termination grace period, which the hook's time counts against; seconds.
        keeps_leases: Whether others may still have to read its blocks. What a decode worker keeps for the next turn is
            a cache, which is not waited for.
    """
    if not finishes_requests:
        series = (*_REQUEST_SERIES, _LEASE_SERIES) if keeps_leases else _REQUEST_SERIES
        return {"preStop": {"exec": {"command": ["python3", "-c", _WAIT_UNTIL_IDLE % (series,)]}}}
    settle_s = min(SETTLE_S, grace_s - 1)  # Kubernetes asks for less than the grace period
    return {"preStop": {"sleep": {"seconds": settle_s}}} if settle_s > 0 else {}
