"""A whole profile of a server that runs: every point once, kept through a kill, and gone on with."""

import pytest

from penstock.api import Role
from penstock.core.errors import ConfigError, UpstreamError
from penstock.performance.quality import sweep_warnings
from penstock.performance.recommend import Targets
from penstock.performance.sweep import DecodePoint, EngineSweep, PrefillPoint
from penstock.profiler.journal import JOURNAL, Cache, Decode, Journal, Prefill
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
    """Another limit on requests in flight measures what lacks, and a run without one sends no prompt."""
    await profiled(max_concurrency=2)
    asked = len(fake_engine.bodies)
    first = await profiled()
    more = len(fake_engine.bodies)
    second = await profiled()

    assert 0 < more < asked
    assert asked + more > 30
    assert fake_engine.bodies == []
    assert second.sweep.engines == first.sweep.engines
    engine = first.sweep.engine(2)
    assert engine.kv_tokens == 64_000
    assert {point.concurrency for point in engine.decode} == {1, 2, 3}
    sweep_warnings(first.sweep)
    assert profiled.steps[-1].finished <= profiled.steps[-1].planned


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


CONDITIONS = {"decode": "worker --a 1", "prefill": "worker --a 1"}


def filled(folder):
    """A journal of one engine with a point of each phase, and a batch that does not run."""
    journal = Journal(folder)
    journal.begin(1, "TP1", CONDITIONS)
    for record in (
        Cache(1, Role.PREFILL, 1000),
        Cache(1, Role.DECODE, 1000),
        Prefill(1, 100, 101.0, 0.02),
        Decode(1, 512, 4, 0.01, 400.0),
        Decode(1, 512, 9),
    ):
        journal.keep(record)


def test_points_are_there_again(tmp_path):
    """Of the same engine under the same conditions; a line that a kill tore is forgotten, and what follows it is whole."""
    filled(tmp_path)
    path = tmp_path / JOURNAL
    path.write_text(path.read_text() + '{"kind": "prefill", "gpus": 1, "ask')
    journal = Journal(tmp_path)
    journal.begin(1, "TP1", CONDITIONS)
    journal.keep(Prefill(1, 200, 201.0, 0.03))

    again = Journal(tmp_path)
    again.begin(1, "TP1", CONDITIONS)
    points = again.engines[1]
    assert points.prefill == {100: PrefillPoint(101.0, 0.02), 200: PrefillPoint(201.0, 0.03)}
    assert points.decode[512, 9] is None
    assert points.row(512) == [DecodePoint(512.0, 4.0, 0.01, 400.0)]
    prefill = tuple(points.prefill.values())
    assert points.sweep(1) == EngineSweep(1, 1000, prefill, tuple(points.row(512)), "TP1")


def test_other_conditions_are_refused_and_named(tmp_path):
    """Figures of two settings must not be mixed."""
    filled(tmp_path)
    journal = Journal(tmp_path)

    with pytest.raises(
        ConfigError, match="decode was 'worker --a 1', now 'worker --a 2'; give another --output-dir"
    ):
        journal.begin(1, "TP1", {**CONDITIONS, "decode": "worker --a 2"})
    journal.begin(2, "TP2", {**CONDITIONS, "decode": "worker --a 2"})


@pytest.mark.parametrize("line", ["[]", '{"kind": "prefill"}', "rubbish", '{"gpus": 1, "kind": "engine"}'])
def test_a_file_that_is_no_journal_is_refused_with_its_line(tmp_path, line):
    """It is not overwritten."""
    (tmp_path / JOURNAL).write_text(line + "\n")

    with pytest.raises(ConfigError, match=f"{JOURNAL}:1: not a line of a profile"):
        Journal(tmp_path)
