"""Measures what an apply and a watch's event cost: Penstock's client and the official one, side by side.

    python bench/kube_client.py [--applies 500] [--json]

Starts etcd and kube-apiserver from KUBEBUILDER_ASSETS. Each way applies the same ConfigMap, changed every time,
by server-side apply, one call after the other, in turns. Then each way follows the same changes by a watch, from
the version before the first. Reported: milliseconds of this process's processor time for one apply and for one
event, and the ratio to Penstock's. For an apply the official clients take a dictionary and return an object of
their models; its Watch gives dictionaries. Penstock calls the official dynamic client and reads JSON by orjson.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / each) for each in ("cluster", "support")]

import kubernetes  # noqa: E402
import kubernetes.aio  # noqa: E402
from apiserver import ControlPlane, missing_assets  # noqa: E402
from kubernetes.aio.dynamic import DynamicClient  # noqa: E402
from options import read_options  # noqa: E402

from penstock.core.http.loop import run  # noqa: E402
from penstock.kube.client import KubeClient  # noqa: E402
from penstock.kube.informer import Informer  # noqa: E402
from penstock.kube.kinds import CONFIG_MAP  # noqa: E402

ROUNDS = 5
LABEL = "app=bench"
OPTIONS = {"field_manager": "bench", "force": True, "_content_type": "application/apply-patch+yaml"}


def config_map(number: int) -> dict[str, Any]:
    """Return a ConfigMap of some size."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "bench", "namespace": "default", "labels": {"app": "bench"}},
        "data": {f"key-{each}": f"value {number} of {each}" for each in range(40)},
    }


async def per_apply_ms(apply: Callable[[dict[str, Any]], Awaitable[object]], applies: int) -> float:
    """Return the processor time of one apply."""
    await apply(config_map(-1))
    started_s = time.process_time()
    for number in range(applies):
        await apply(config_map(number))
    return (time.process_time() - started_s) * 1000 / applies


async def per_event_ms(follow: Callable[[], Awaitable[int]]) -> float:
    """Return the processor time of one event; ``follow`` returns how many it has read."""
    started_s = time.process_time()
    events = await follow()
    return (time.process_time() - started_s) * 1000 / events


async def follow_by_informer(client: KubeClient, version: str, events: int) -> int:
    """Read this many events of the ConfigMap with an informer."""
    is_done = asyncio.Event()
    seen = 0

    def on_change(_what: str, _obj: dict[str, Any]) -> None:
        nonlocal seen
        seen += 1
        if seen == events:
            is_done.set()

    informer = Informer(client, CONFIG_MAP, namespace="default", labels=LABEL, on_change=on_change)
    informer.resource_version = version
    running = asyncio.create_task(informer.run())
    await is_done.wait()
    running.cancel()
    await asyncio.wait([running])
    return seen


async def follow_by_watch(api: kubernetes.aio.client.ApiClient, version: str, events: int) -> int:
    """Read this many events of the ConfigMap with the official client's Watch, as plain dictionaries."""
    query = {"watch": "true", "resourceVersion": version, "timeoutSeconds": "60", "labelSelector": LABEL}

    async def opened(**_: object) -> Any:
        path, params = CONFIG_MAP.path("default"), list(query.items())
        return await DynamicClient(api).request("GET", path, query_params=params, serialize=False)

    seen = 0
    async with kubernetes.aio.watch.Watch() as watch:
        async for _event in watch.stream(opened, timeout_seconds=60):
            seen += 1
            if seen == events:
                break
    return seen


async def measure(kubeconfig: Path, applies: int) -> dict[str, dict[str, float]]:
    """Return each way's median over the rounds, by what is measured."""
    ours = await KubeClient.connect(kubeconfig=kubeconfig)
    await kubernetes.aio.config.load_kube_config(str(kubeconfig))
    kubernetes.config.load_kube_config(str(kubeconfig))
    theirs = kubernetes.aio.client.CoreV1Api()
    blocking = kubernetes.client.CoreV1Api()

    async def by_ours(obj: dict[str, Any]) -> object:
        return await ours.apply(obj, field_manager="bench")

    async def by_theirs(obj: dict[str, Any]) -> object:
        return await theirs.patch_namespaced_config_map("bench", "default", obj, **OPTIONS)

    async def by_blocking(obj: dict[str, Any]) -> object:
        return blocking.patch_namespaced_config_map("bench", "default", obj, **OPTIONS)

    ways = {"penstock": by_ours, "kubernetes.aio": by_theirs, "kubernetes": by_blocking}
    applied: dict[str, list[float]] = {name: [] for name in ways}
    followed: dict[str, list[float]] = {"penstock": [], "kubernetes.aio": []}
    for _ in range(ROUNDS):
        first = (await ours.list(CONFIG_MAP, namespace="default")).resource_version
        for name, way in ways.items():
            applied[name].append(await per_apply_ms(way, applies))
        follow = partial(follow_by_informer, ours, first, applies)
        followed["penstock"].append(await per_event_ms(follow))
        follow = partial(follow_by_watch, theirs.api_client, first, applies)
        followed["kubernetes.aio"].append(await per_event_ms(follow))
    await ours.close()
    await theirs.api_client.close()
    found = {"apply": applied, "watch event": followed}
    return {verb: {name: round(median(each), 3) for name, each in by.items()} for verb, by in found.items()}


def main() -> None:
    """Parse, measure, print."""
    options = read_options(__doc__, applies=500)
    if (missing := missing_assets()) is not None:
        sys.exit(missing)

    async def measured(_stop: asyncio.Event) -> dict[str, dict[str, float]]:
        with ControlPlane() as plane:
            return await measure(plane.kubeconfig, options.applies)

    found = run(measured)
    if options.json:
        print(json.dumps(found))
        return
    for verb, by_way in found.items():
        for name, value in by_way.items():
            ratio = value / by_way["penstock"]
            print(f"{verb:12} {name:15} {value:7.3f} ms of processor time, {ratio:4.1f} times Penstock's")


if __name__ == "__main__":
    main()
