"""The runtime of docs/runtimes.md, built as the distribution that the page shows: it serves here and deploys there."""

import asyncio
import dataclasses
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from patience import LIMIT_S, until

from penstock.api import Role
from penstock.api.manifests import load_graph
from penstock.api.rule import Rule
from penstock.api.runtimes import traits_of
from penstock.core.errors import InvalidSpecError
from penstock.core.plugins import registered
from penstock.local.store import StateStore
from penstock.local.target import LocalTarget
from penstock_operator.resources import BuildContext, children

PAGE = (Path(__file__).parents[2] / "docs" / "runtimes.md").read_text()


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    """The folder into which the page's distribution is installed."""
    source, installed = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("installed")
    for name, language in (("pyproject.toml", "toml"), ("acme_runtime.py", "python")):
        (source / name).write_text(re.search(rf"```{language}\n(.*?)```", PAGE, re.DOTALL).group(1))
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    subprocess.run(build, cwd=source, check=True, capture_output=True, timeout=LIMIT_S)
    with zipfile.ZipFile(next(source.glob("dist/*.whl"))) as wheel:
        wheel.extractall(installed)
    return installed


@pytest.fixture
def graph(package, world, monkeypatch) -> Iterator[Path]:
    """A manifest of that runtime, whose package is installed."""
    monkeypatch.syspath_prepend(package)
    registered.cache_clear()
    world.env["PYTHONPATH"] = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    path = world.manifest(prefill=1)
    path.write_text(path.read_text().replace("runtime: simulated", "runtime: acme"))
    yield path
    registered.cache_clear()


def test_it_serves_on_this_machine(world, graph):
    """`penstock up` starts its workers behind Penstock's router, and they answer."""
    world.up(graph, speed=1.0, flags=("--no-planner",))
    assert world.complete(max_tokens=3)["usage"]["completion_tokens"] == 3
    (worker,) = world.entries("decode").values()
    assert worker["env"] == {"ACME_HOST": "127.0.0.1"}
    assert world.down().returncode == 0


async def test_its_workers_are_scaled_and_drained(world, graph, stream):
    """Up and down by the local target: the one that leaves is seen busy on its own page, and its streams are complete."""
    world.up(graph, speed=1.0, flags=("--no-planner",))
    target = LocalTarget(StateStore(world.statefile))
    await target.scale(Role.DECODE, 2, decision_id="d000001")
    await asyncio.to_thread(world.wait_ready, prefill=1, decode=2)
    streams = [stream(f"{number:08d} and so on", 300) for number in range(8)]
    tasks = [asyncio.create_task(each.read()) for each in streams]
    await until(
        lambda: all(each.text for each in streams) or any(task.done() for task in tasks),
        "every stream speaks",
    )
    assert not any(task.done() for task in tasks), world.logs()

    await target.scale(Role.DECODE, 1, decision_id="d000002")
    await asyncio.gather(*tasks)
    await target.close()

    assert [each.problem for each in streams if not each.is_complete] == [], world.logs()

    def is_gone():
        assert len(world.entries("decode", "ready")) <= 1, "the worker that leaves no longer drains"
        return len(world.entries("decode", "ready", "draining")) == 1

    await until(is_gone, "the drained worker is gone", blocks=True)


def test_the_operator_builds_its_pods(graph):
    """Its own image and variables for workers, Penstock's for the router; liveness as of any real engine."""
    objects = children(
        load_graph(graph), BuildContext(owner_uid="u", namespace="n"), replicas={}, unavailable={}
    )
    pods = {
        each["metadata"]["name"]: each["spec"]["template"]["spec"]
        for each in objects
        if each["kind"] == "Deployment"
    }
    (worker,), (router,) = pods["world-decode"]["containers"], pods["world-frontend"]["containers"]
    variables = {each["name"]: each.get("value") for each in worker["env"]}
    assert worker["image"] == "registry.example/acme:1.0"
    assert worker["args"][:5] == ["-m", "penstock.cli", "engine", "serve", "m"]
    assert "$(POD_IP)" == variables["ACME_POD"] == variables["ACME_HOST"]
    assert router["image"].startswith("ghcr.io/penstock/penstock:")
    assert "ACME_POD" not in {each["name"] for each in router["env"]}


def test_its_rules_hold_where_its_package_is_installed(graph, monkeypatch):
    """They read the whole specification, as Penstock's own do."""
    rule = Rule(
        path="image",
        must="acme needs an image",
        cel=None,
        holds=lambda spec: spec.image is not None,
        text="null",
        remedy="give it",
    )
    acme = sys.modules["acme_runtime"].Acme if traits_of("acme") else None
    monkeypatch.setattr(acme, "traits", dataclasses.replace(acme.traits, rules=(rule,)))
    with pytest.raises(InvalidSpecError, match=r"spec\.image: null; give it"):
        load_graph(graph)


def test_without_its_package_the_name_is_refused(world):
    """With the names that are installed."""
    path = world.manifest()
    path.write_text(path.read_text().replace("runtime: simulated", "runtime: absent"))
    with pytest.raises(
        InvalidSpecError,
        match=r'"absent" is not one of vllm, dynamo, sglang, trtllm, simulated.*install the package',
    ):
        load_graph(path)
