"""Simulated engines are measured in virtual time: their figures are their latency profile's, on any machine."""

import pytest

from penstock.api import Role
from penstock.core.errors import ConfigError
from penstock.engine import profiles
from penstock.performance.recommend import Targets
from penstock.profiler.plan import ProfileConfig, plan_profile
from penstock.profiler.session import run_profile
from penstock.profiler.simulated import SimulatedMeasurer, simulated_settings, transfer_of

PROFILE = "a100-llama-8b-bf16-tp1"


@pytest.fixture
def measurer(build):
    """Of a worker of the base graph."""
    return SimulatedMeasurer(simulated_settings(build().spec, PROFILE))


@pytest.mark.parametrize("tokens", [1, 128, 3000, 40_000])
async def test_a_prompt_takes_what_its_profile_says(measurer, tokens):
    """However many steps compute it."""
    point = await measurer.prefill(tokens)

    assert point.prompt_tokens == tokens
    assert point.ttft_s == pytest.approx(profiles.load(PROFILE).latency().prefill.ttft_s(tokens), rel=1e-9)


@pytest.mark.parametrize(("context", "count"), [(512, 1), (512, 256), (3075, 28), (16_320, 26)])
async def test_a_batch_takes_what_its_profile_says(measurer, context, count):
    """Its prompts are cached, so that nothing but decode is in the window."""
    point, doubts = await measurer.decode(context, count)
    step_s = profiles.load(PROFILE).latency().decode.step_s(count, count * context)

    assert doubts == ()
    assert (point.context, point.concurrency) == (context, count)
    assert point.itl_s == pytest.approx(step_s, rel=0.01)
    assert point.tokens_per_s == pytest.approx(count / step_s, rel=0.01)


async def test_a_batch_that_does_not_run_at_once_is_no_point(build):
    """More requests than a batch holds."""
    spec = build(engine={"maxRunningRequests": 4}).spec

    point, doubts = await SimulatedMeasurer(simulated_settings(spec, PROFILE)).decode(512, 9)

    assert point is None
    assert doubts == ("9 requests of 512 tokens do not run at once",)


def test_a_worker_that_would_not_start_is_refused(build):
    """With the words that it would end with."""
    with pytest.raises(ConfigError, match="--max-model-len 900000 exceeds the KV cache"):
        simulated_settings(build(model={"contextTokens": 900_000}).spec, PROFILE)


def test_the_transfer_is_the_simulated_links(build):
    """5 ms, and 131,072 bytes a token at 25 GB/s."""
    transfer = transfer_of(simulated_settings(build().spec, PROFILE))

    assert transfer.of(3000) == pytest.approx(0.005 + 3000 * 131_072 / 25e9)


async def test_a_profile_is_the_same_each_time_and_starts_nothing(build, tmp_path):
    """Of the decode's and the prefill's own profiles; a second folder gets the same points, bit for bit."""
    graph = build(
        engine={"profile": PROFILE},
        planner={"maxGpuBudget": 2},
        services={"decode": {"args": ["--seed", "1"]}},
    )
    found = []
    for name in "ab":
        targets = Targets(isl=600, osl=40, ttft_s=0.5, itl_s=0.05)
        config = ProfileConfig(targets, tmp_path / name, graph=graph, max_context=2000)
        plan = plan_profile(config, detect=lambda: None)
        found.append(await run_profile(plan, lambda step: None))

    assert found[0] == found[1]
    assert found[0].doubts == ()
    assert found[0].sweep.engine(1).transfer == plan.engines[0].transfer
    assert {server.phases for server in plan.engines[0].servers} == {(Role.PREFILL,), (Role.DECODE,)}
    assert "the args of decode are not simulated" in plan.note
