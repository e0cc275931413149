"""A leader whose node's clock is wrong continues what the last one began."""

from __future__ import annotations

import time

from graph_harness import KEY, Loads, edit, operator, pod, to_rest, told

from penstock.core.errors import UnavailableError
from penstock.core.stamps import stamp
from penstock_operator.plan.drain import PodLoad

AHEAD_S = 3600


async def test_a_clock_that_is_ahead_cuts_no_drain(api, monkeypatch):
    """A worker with a stream, drained for 5 s of its 600, stays; a server that does not answer changes nothing."""
    true_time = time.time

    async def server_time_s():
        return float(int(true_time()))

    async def away():
        raise UnavailableError("the API server does not answer")

    api.server_time_s = server_time_s
    async with operator(api, Loads({"decode-1": PodLoad(1, 0, 0.4)})) as made:
        await to_rest(api, made)
        edit(api, "ScalingAdapter", "g-decode", replicas=2)
        await to_rest(api, made)
        for number in (1, 2):
            busy = pod(f"decode-{number}", "decode", gated=False, ready=True, phase="Running")
            busy["spec"]["terminationGracePeriodSeconds"] = 600
            if number == 1:
                busy["metadata"]["labels"]["penstock.dev/serving"] = "draining"
                busy["metadata"]["annotations"] |= {
                    "penstock.dev/drain-since": stamp(true_time() - 5),
                    "controller.kubernetes.io/pod-deletion-cost": str(-(2**31) + 1),
                }
            await api.create(busy, field_manager="kubelet")
        edit(api, "ScalingAdapter", "g-decode", replicas=1)
        monkeypatch.setattr("time.time", lambda: true_time() + AHEAD_S)
        await made.clock.measure()
        api.server_time_s = away
        await made.clock.measure()
        for _ in range(4):
            await told(api)
            await made.reconciler.reconcile(KEY)
        assert api.at("Deployment", "g-decode")["spec"]["replicas"] == 2
        assert abs(made.clock.now_s() - true_time()) < AHEAD_S / 2
