"""Changed admission and tiers sections reach a running router: the operator's own ConfigMap text, and wrong files."""

import asyncio

import orjson
import pytest

from penstock.api import GraphDeployment
from penstock_operator.resources.router_config import config_digest, router_manifest


def graph(*, tiers=None, **admission):
    """A graph of aggregated workers with an admission section, and a tiers section."""
    return GraphDeployment.model_validate(
        {
            "metadata": {"name": "g"},
            "spec": {
                "model": {"name": "llama"},
                "runtime": "simulated",
                "services": {"router": {"role": "router"}, "agg": {"role": "aggregated"}},
                "router": {"admission": admission, "tiers": tiers or {}},
            },
        }
    )


def write(file, text):
    """Replace a file as a kubelet does: a new one takes its name."""
    fresh = file.with_suffix(".new")
    fresh.write_text(text, encoding="utf-8")
    fresh.replace(file)


@pytest.fixture
async def followed(harness, tmp_path):
    """A router that follows a file, with a worker whose KV is 90% full."""
    file = tmp_path / "graph.yaml"
    write(file, router_manifest(graph()))
    worker = await harness.worker("aggregated")
    worker.kv_usage = "0.9"
    router = await harness.router(worker, graph_file=file)
    await router.until(lambda: all(each.kv_usage_fraction == 0.9 for each in router.server.core.pool))
    return router, file


async def test_a_changed_section_holds_without_a_restart(followed):
    """What the operator writes for `mode: token-capacity` rejects within seconds, and `none` ends it."""
    router, file = followed
    busy = router.server.core.busy[router.server.core.entry]
    assert not busy.thresholds.is_set
    write(file, router_manifest(graph(mode="token-capacity", retryAfterSeconds=7)))
    await router.until(lambda: busy.thresholds.is_set)
    answer = await router.post(max_tokens=1)
    assert (answer.status, answer.headers[b"retry-after"]) == (503, b"7")
    write(file, router_manifest(graph()))
    await router.until(lambda: not busy.thresholds.is_set)
    assert (await router.post(max_tokens=1)).status == 200


async def test_thresholds_set_at_run_time_stay_until_the_section_changes(followed):
    """A file that is written again as it was takes nothing back."""
    router, file = followed
    body = orjson.dumps({"model": "llama", "active_decode_blocks_threshold": 0.5})
    assert (await router.post("/busy_threshold", raw=body)).status == 200
    busy = router.server.core.busy[router.server.core.entry]
    write(file, router_manifest(graph()))
    await router.server._check_graph_file(file)
    assert busy.thresholds.active_decode_blocks_threshold == 0.5
    write(file, router_manifest(graph(mode="token-capacity")))
    await router.until(lambda: busy.thresholds.active_decode_blocks_threshold == 0.85)


@pytest.mark.parametrize(
    ("sections", "section", "remedy"),
    [
        ({"activeDecodeBlocksThreshold": 0.4}, "admission", "set mode: token-capacity"),
        (
            {"tiers": {"enabled": False, "models": {"llama-batch": "background"}}},
            "tiers",
            "set enabled: true",
        ),
    ],
)
async def test_an_edit_of_a_section_that_is_off_is_said_to_have_no_effect(
    followed, caplog, sections, section, remedy
):
    """It is not a change of settings, and what was set at run time stays."""
    router, file = followed
    body = orjson.dumps({"model": "llama", "active_decode_blocks_threshold": 0.5})
    assert (await router.post("/busy_threshold", raw=body)).status == 200
    write(file, router_manifest(graph(**sections)))
    await router.server._check_graph_file(file)

    def said():
        return [(each.getMessage(), each.keys) for each in caplog.records if "settings" in each.getMessage()]

    # The router's own look may have been first, and still be reading.
    await router.until(said)
    assert said() == [("router settings edited without effect", {"section": section, "remedy": remedy})]
    busy = router.server.core.busy[router.server.core.entry]
    assert busy.thresholds.active_decode_blocks_threshold == 0.5


@pytest.mark.parametrize("text", ["", "{", "kind: GraphDeployment\nspec: 3\n"])
async def test_a_wrong_file_changes_nothing(followed, text):
    """Neither does one that is gone; the next right one is taken."""
    router, file = followed
    busy = router.server.core.busy[router.server.core.entry]
    write(file, router_manifest(graph(mode="token-capacity")))
    await router.until(lambda: busy.thresholds.is_set)
    write(file, text)
    await router.server._check_graph_file(file)
    file.unlink()
    await router.server._check_graph_file(file)
    assert busy.thresholds.is_set
    write(file, router_manifest(graph()))
    await router.until(lambda: not busy.thresholds.is_set)
    await asyncio.sleep(0)


async def test_changed_tiers_hold_for_the_next_request(harness, tmp_path):
    """Names, shares and targets change while the router runs, and its queue and monitor take them."""
    file = tmp_path / "graph.yaml"
    section = {"enabled": True}
    write(file, router_manifest(graph(tiers=section)))
    worker, router = await harness.served("aggregated", graph_file=file, config={"tiers": section})
    body = orjson.dumps({"model": "llama-batch", "prompt": "hello"})
    assert (await router.post(raw=body)).status == 404
    shares = {"premium": 0.2, "standard": 0.2, "background": 0.6}
    changed = {
        **section,
        "models": {"llama-batch": "background"},
        "shares": shares,
        "slo": {"premium": {"ttft": "9s"}},
        "shedding": {"windowSeconds": 7},
    }
    write(file, router_manifest(graph(tiers=changed)))
    core = router.server.core
    await router.until(lambda: core.tiers.monitor.tiers.shedding.window_seconds == 7)
    assert (await router.post(raw=body)).status == 200
    assert worker.seen[-1].body == {"model": "llama", "prompt": "hello", "priority": 2}
    assert core.entry_queue.settings.tiers.shares.background == 0.6
    assert core.tiers.monitor.tiers.slo.premium.ttft_seconds == 9


def test_the_operator_rolls_no_router_for_it():
    """The digest on the pods stays; another section's change rolls them."""
    before = config_digest(graph())
    assert config_digest(graph(mode="token-capacity", activeDecodeBlocksThreshold=0.5)) == before
    assert router_manifest(graph(mode="token-capacity")) != router_manifest(graph())
    tiers = {"shares": {"premium": 0.2, "standard": 0.2, "background": 0.6}, "header": "x-other"}
    assert config_digest(graph(tiers=tiers)) == before
    for rolled in ({"enabled": True}, {"keysSecret": "keys"}):
        assert config_digest(graph(tiers=rolled)) != before
    other = graph().model_copy(deep=True)
    changed = other.spec.model_copy(update={"slo": other.spec.slo.model_copy(update={"ttft_seconds": 1.0})})
    assert config_digest(other.model_copy(update={"spec": changed})) != before
