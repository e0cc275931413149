"""The simulated worker shows nothing that a real vLLM does not: held against a recording of one."""

import asyncio
import importlib.util
import json
from pathlib import Path

import pytest

from penstock.core import metric_names
from penstock.engine.core.requests import EngineRole
from penstock.engine.serve.server import EngineServer
from penstock.engine.serve.settings import ServeFlags, resolve

_HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def recorded():
    """What vLLM 0.32 showed."""
    return json.loads((_HERE / "data" / "vllm-0.32.0.json").read_text())


@pytest.fixture(scope="module")
def simulated():
    """The same requests, sent to simulated workers."""
    path = _HERE.parent / "real" / "record_surface.py"
    spec = importlib.util.spec_from_file_location("record_surface", path)
    recorder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(recorder)
    return asyncio.run(_record(recorder.record))


async def _record(record):
    async with asyncio.TaskGroup() as group:
        servers = []
        for role in (EngineRole.PREFILL, EngineRole.DECODE):
            flags = ServeFlags(
                "m",
                "h200-llama-3.1-8b-tp1",
                role=role,
                port=0,
                speed=50.0,
                max_model_len=2048,
                block_size=128,
            )
            servers.append(EngineServer(resolve(flags), group))
            await servers[-1].start()
        shown = await asyncio.to_thread(record, *(server.url for server in servers))
        for server in servers:
            await server.close(grace_s=0)
    return shown


def _missing(shown, known, path=""):
    """Return the paths of what is shown and not known; null stands for a value."""
    if isinstance(shown, dict):
        if not isinstance(known, dict):
            return [path] if shown else []
        return [
            found
            for key, value in shown.items()
            for found in (_missing(value, known[key], f"{path}.{key}") if key in known else [f"{path}.{key}"])
        ]
    if isinstance(shown, list):
        return [found for each in shown for found in _missing(each, known[0], path)] if known else [path]
    return []


def test_metrics_are_vllms(simulated, recorded):
    """Each name has vLLM's type, its labels or fewer, its buckets and its closed sets of values."""
    for name, shown in simulated["metrics"].items():
        known = recorded["metrics"][name]
        assert shown["type"] == known["type"], name
        assert set(shown["labels"]) <= set(known["labels"]), name
        assert shown.get("buckets") == known.get("buckets"), name
        for closed in ("reason", "finished_reason"):
            assert set(shown.get(closed, [])) <= set(known.get(closed, [])), name


def test_all_but_the_configuration_has_all_of_vllms_labels(simulated, recorded):
    """A query that selects by a label finds simulated workers too."""
    for name, shown in simulated["metrics"].items():
        if name != metric_names.VLLM_CACHE_CONFIG_INFO:
            assert shown["labels"] == recorded["metrics"][name]["labels"], name


def test_every_name_that_penstock_reads_exists(recorded):
    """In the real page, under the type that its use implies."""
    names = {value for key, value in vars(metric_names).items() if key.startswith("VLLM_")}

    assert names <= recorded["metrics"].keys()


@pytest.mark.parametrize("part", ["completion", "chat", "prefill", "models"])
def test_fields_of_answers_are_vllms(simulated, recorded, part):
    """No field that a real worker does not send."""
    assert _missing(simulated[part], recorded[part]) == []


@pytest.mark.parametrize("part", ["completion_events", "chat_events"])
def test_fields_of_events_are_vllms(simulated, recorded, part):
    """The first event of a stream, those with text, and the one with usage."""
    first, *_, last = simulated[part]

    assert _missing(first, recorded[part][0]) == []
    assert _missing(last, recorded[part][-1]) == []
    for event in simulated[part]:
        assert min(len(_missing(event, known)) for known in recorded[part]) == 0


def test_errors_are_vllms(simulated, recorded):
    """Status and fields, for the same bad requests."""
    assert simulated["errors"] == recorded["errors"]
