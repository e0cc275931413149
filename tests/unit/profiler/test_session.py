"""A whole profile of a server that runs: every point once, kept, and gone on with."""

import pytest

from penstock.core.errors import ConfigError, UpstreamError
from penstock.performance.quality import Severity, sweep_findings
from penstock.performance.recommend import Targets
from penstock.profiler.plan import ProfileConfig, plan_profile
from penstock.profiler.session import run_profile

TARGETS = Targets(isl=600, osl=40, ttft_s=1.0, itl_s=0.5)


@pytest.fixture
def profiled(fake_engine, tmp_path):
    """Return a function that profiles the fake engine; its steps are in ``steps``."""
    steps = []

    async def run(**changes):
        fake_engine.bodies.clear()
        options = {"max_context": 1000, "max_concurrency": 3, "timeout_s": 5.0, **changes}
        config = ProfileConfig(TARGETS, tmp_path, endpoint=fake_engine.url, sizes=(2,), **options)
        return await run_profile(plan_profile(config, detect=lambda: None), steps.append)

    run.steps = steps
    return run


async def test_every_point_is_measured_once_and_kept(fake_engine, profiled):
    """The second run of the same folder sends no prompt; the size and the cache are as said."""
    first = await profiled()
    asked = len(fake_engine.bodies)
    second = await profiled()

    assert asked > 30
    assert fake_engine.bodies == []
    assert second.sweep.engines == first.sweep.engines
    engine = first.sweep.engine(2)
    assert engine.kv_tokens == 64_000
    assert {point.concurrency for point in engine.decode} == {1, 2, 3}
    assert not [each for each in sweep_findings(first.sweep) if each.severity is Severity.ERROR]
    assert profiled.steps[-1].finished <= profiled.steps[-1].planned


async def test_more_points_are_added_to_those_there_are(fake_engine, profiled):
    """Another limit on requests in flight measures what lacks, and nothing again."""
    await profiled(max_concurrency=2)
    measured = len(fake_engine.bodies)
    more = await profiled(max_concurrency=3)

    assert 0 < len(fake_engine.bodies) < measured
    assert {point.concurrency for point in more.sweep.engine(2).decode} == {1, 2, 3}


async def test_points_before_a_failure_are_kept(fake_engine, profiled):
    """The server fails at a long prompt; once it serves again, only the rest is measured."""

    async def short_only(body, responder):
        if len(body["prompt"]) > 3000:
            responder.send(500, b'{"error": {"message": "out of memory"}}')
        else:
            await fake_engine.stream(body, responder)

    fake_engine.script = short_only
    with pytest.raises(UpstreamError, match="out of memory"):
        await profiled()
    failed_after = len(fake_engine.bodies)
    fake_engine.script = None

    result = await profiled()

    assert failed_after > 5
    assert len(result.sweep.engine(2).prefill) >= 10


async def test_another_speed_than_the_servers_is_refused(fake_engine, profiled):
    """Every time measured would be wrong."""
    fake_engine.page += b"\npenstock_time_scale 5"

    with pytest.raises(ConfigError, match="runs at 5"):
        await profiled()
