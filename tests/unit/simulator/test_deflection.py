"""Prefill deflection in a simulation: the live router's core decides, the decode worker's engine computes."""

from dataclasses import replace

import numpy as np

from penstock.simulator.jobs import JobOutcome
from penstock.simulator.scenario import ProfiledModel, unbounded_router
from penstock.simulator.simulation import Simulation

MODEL = ProfiledModel("a100-llama-8b-bf16-tp1", max_num_batched_tokens=256)
ITL_S = 0.05


def run(split_world, requests, **options):
    """Return a finished simulation of one prefill and two decode workers."""
    router = unbounded_router("least-loaded")
    router = router.model_copy(
        update={"prefill_deflection": router.prefill_deflection.model_copy(update=options)}
    )
    world = Simulation(replace(split_world(1, 2, model=MODEL), router=router), requests)
    world.recording = world.run()
    return world


def test_a_burst_is_served_sooner_and_no_gap_exceeds_the_target(split_world, request_at):
    """Streams under way keep their ITL while their workers compute prompts of a burst; every request ends once."""
    steady = [request_at(at, 400, 300) for at in np.arange(0.0, 6.0, 0.5)]
    burst = [request_at(6 + n / 30, 800, 50) for n in range(100)]
    requests = sorted([*steady, *burst], key=lambda each: each.arrival_s)

    without, deflected = (
        run(split_world, requests),
        run(split_world, requests, enabled=True, itl_seconds=ITL_S),
    )

    assert without.routers[0].core.deflection is None
    assert deflected.routers[0].core.deflection.total >= 5
    for world in (without, deflected):
        assert all(job.outcome is JobOutcome.OK for job in world.jobs)
        for worker in world.routers[0].core.pool:
            assert worker.inflight_requests == 0
    taken = [job for job in deflected.jobs if job.is_deflected]
    assert all(job.worker == "" and job.decoder for job in taken)
    before, after = (np.quantile(world.recording.requests.ttft_s, 0.9) for world in (without, deflected))
    assert after < 0.9 * before
    assert deflected.gaps.percentile(0.999) <= ITL_S * 1.05
