"""Measures what one write to the API server costs: Penstock's client and the official one, side by side.

    python bench/kube_client.py [--applies 500] [--json]

Starts etcd and kube-apiserver from KUBEBUILDER_ASSETS. Each way applies the same ConfigMap, changed every time,
by server-side apply, one call after the other, in turns. Reported: milliseconds of this process's processor time
for one apply. The official client takes a dictionary and returns an object of its models, as its users have it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "cluster"))

import kubernetes  # noqa: E402
import kubernetes.aio  # noqa: E402
from apiserver import ControlPlane, missing_assets  # noqa: E402

from penstock.core.http.loop import run  # noqa: E402
from penstock.kube.client import KubeClient  # noqa: E402

ROUNDS = 5
OPTIONS = {"field_manager": "bench", "force": True, "_content_type": "application/apply-patch+yaml"}


def config_map(number: int) -> dict[str, Any]:
    """Return a ConfigMap of some size."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "bench", "namespace": "default"},
        "data": {f"key-{each}": f"value {number} of {each}" for each in range(40)},
    }


async def per_apply_ms(apply: Callable[[dict[str, Any]], Awaitable[object]], applies: int) -> float:
    """Return the processor time of one apply."""
    await apply(config_map(-1))
    started_s = time.process_time()
    for number in range(applies):
        await apply(config_map(number))
    return (time.process_time() - started_s) * 1000 / applies


async def measure(kubeconfig: Path, applies: int) -> dict[str, float]:
    """Return each way's median over the rounds."""
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

    ways = {"penstock (aiohttp)": by_ours, "kubernetes.aio": by_theirs, "kubernetes": by_blocking}
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, way in ways.items():
            found[name].append(await per_apply_ms(way, applies))
    await ours.close()
    await theirs.api_client.close()
    return {name: round(median(each), 2) for name, each in found.items()}


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--applies", type=int, default=500, help="applies per way and round")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    if (missing := missing_assets()) is not None:
        sys.exit(missing)

    async def measured(_stop: asyncio.Event) -> dict[str, float]:
        with ControlPlane() as plane:
            return await measure(plane.kubeconfig, options.applies)

    found = run(measured)
    if options.json:
        print(json.dumps(found))
        return
    for name, value in found.items():
        print(f"{name:20} {value:6.2f} ms of processor time an apply")


if __name__ == "__main__":
    main()
