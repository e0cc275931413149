from __future__ import annotations

from penstock_planner.readiness import LATE_S, Readiness


async def test_a_planner_without_metrics_is_ready_and_one_without_its_backend_is_not(world):
    """Routers that are away are not a fault of the planner; a backend that cannot be read leaves it nothing to do."""
    readiness = Readiness(world.time.now_s)
    world.watch(readiness.begin("serving", "llama", interval_s=1.0))
    world.load.kv = world.load.queue = lambda _now, _workers: None
    await world.run_until(40)
    assert readiness.problem() is None
    world.backend.fails = True
    await world.run_until(45)
    assert readiness.problem() == (
        "serving/llama: no backend can be read, so no decisions are made; see the log"
    )
    world.backend.fails = False
    await world.run_until(50)
    assert readiness.problem() is None


async def test_one_graph_whose_backend_cannot_be_read_leaves_the_process_ready(world):
    """That graph's status says so; the others are planned."""
    readiness = Readiness(world.time.now_s)
    readiness.begin("serving", "well", interval_s=1.0)
    world.watch(readiness.begin("serving", "llama", interval_s=1.0))
    world.backend.fails = True
    await world.run_until(5)
    assert readiness.problem() is None


async def test_a_loop_that_hangs_is_named_until_it_ends(world):
    """A tick within the interval and the longest calls of the backend is in time."""
    readiness = Readiness(world.time.now_s)
    world.watch(readiness.begin("serving", "llama", interval_s=2.0))
    await world.run_until(10)
    world.time.at_s += 2.0 + LATE_S
    assert readiness.problem() is None
    world.time.at_s += 1.0
    assert readiness.problem() == (
        "serving/llama: no tick for 153 s, at most 152 s are expected; see its log, restart it"
    )
    readiness.end("serving", "llama")
    assert readiness.problem() is None
