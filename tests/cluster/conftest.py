"""A real API server for the session, and a namespace and a client for each test.

Skipped with a reason where KUBEBUILDER_ASSETS is absent.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "contract"))

from apiserver import CRDS, ControlPlane, asset, missing_assets
from faulty import FaultyProxy
from planning import World
from serving import Serving, served

from penstock.kube.client import KubeClient

_numbers = itertools.count(1)


def pytest_asyncio_loop_factories(config, item):
    """Run these tests on the loop that the processes run on."""
    return {"uvloop": uvloop.new_event_loop}


GOODBYE = "unclosed resource <TCPTransport"
"""Beginning of uvloop's warning of a connection that is open when its loop closes."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items):
    """Run the files that start controllers last: those run on, and write what other tests would count.

    A TLS connection that was closed lives until the API server has answered the goodbye, or for 30 s. If the loop closes in
    between, uvloop warns while it closes the connection; the warning as an error would leave the connection open.
    """
    starting = {item.path for item in items if "controllers" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path in starting)
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.filterwarnings(f"ignore:{GOODBYE}:ResourceWarning"))


@pytest.fixture(scope="session")
def api_server() -> Iterator[ControlPlane]:
    """One API server with its etcd; each xdist worker has its own."""
    reason = missing_assets()
    if reason is not None:
        pytest.skip(reason)
    with ControlPlane() as plane:
        yield plane


@pytest.fixture
def own_api_server() -> Iterator[ControlPlane]:
    """An API server of the test's own, to be killed and restarted."""
    reason = missing_assets()
    if reason is not None:
        pytest.skip(reason)
    with ControlPlane() as plane:
        yield plane


@pytest.fixture(scope="session")
def controllers(api_server: ControlPlane) -> ControlPlane:
    """The API server with kube-controller-manager and kube-scheduler."""
    _need("kube-controller-manager", "kube-scheduler")
    api_server.start_controllers()
    return api_server


@pytest.fixture(scope="session")
def kwok(controllers: ControlPlane) -> ControlPlane:
    """The API server with controllers, scheduler and kwok: nodes are as ready as they are made, pods run."""
    _need("kwok")
    controllers.start_kwok()
    return controllers


@pytest.fixture
def make_node(kwok: ControlPlane) -> Iterator[Callable[..., str]]:
    """Return a function that makes a fake node with GPUs; all are gone after the test."""
    made: list[str] = []

    def make(
        *, gpus: int = 0, labels: dict[str, str] | None = None, taints: list[dict[str, str]] | None = None
    ) -> str:
        name = f"node-{os.getpid()}-{next(_numbers)}"
        amounts = {"cpu": "64", "memory": "512Gi", "pods": "500", "nvidia.com/gpu": str(gpus)}
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": name, "labels": {"kubernetes.io/hostname": name, **(labels or {})}},
            "spec": {"taints": taints or []},
            "status": {"capacity": amounts, "allocatable": amounts},
        }
        kwok.kubectl("create", "-f", "-", stdin=json.dumps(node))
        made.append(name)
        return name

    yield make
    if made:
        kwok.kubectl("delete", "node", *made, "--wait=false", "--ignore-not-found")


@pytest.fixture(scope="session")
def crds(api_server: ControlPlane) -> ControlPlane:
    """The API server with Penstock's CustomResourceDefinitions established."""
    if not any(CRDS.glob("*.yaml")):
        pytest.skip(f"no CustomResourceDefinitions in {CRDS}")
    api_server.install_crds()
    return api_server


@pytest.fixture
def make_namespace(api_server: ControlPlane) -> Iterator[Callable[..., str]]:
    """Return a function that makes a namespace with a default ServiceAccount; deleted after the test."""
    made: list[str] = []

    def make(prefix: str = "test", labels: dict[str, str] | None = None) -> str:
        name = f"{prefix}-{os.getpid()}-{next(_numbers)}"
        namespace = {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": name, "labels": labels or {}},
        }
        # Pods are refused without it, and its maker, the controller manager, may not run.
        account = {
            "apiVersion": "v1",
            "kind": "ServiceAccount",
            "metadata": {"name": "default", "namespace": name},
        }
        api_server.apply(namespace, account)
        made.append(name)
        return name

    yield make
    if made:
        api_server.kubectl("delete", "namespace", *made, "--wait=false", "--ignore-not-found")


@pytest.fixture
def namespace(make_namespace: Callable[..., str]) -> str:
    """A fresh namespace."""
    return make_namespace()


@pytest.fixture
async def client(api_server: ControlPlane) -> AsyncIterator[KubeClient]:
    """The administrator's client."""
    made = await KubeClient.connect(kubeconfig=api_server.kubeconfig, rng=random.Random(1))
    yield made
    await made.close()


@pytest.fixture
async def own(own_api_server: ControlPlane) -> AsyncIterator[tuple[ControlPlane, KubeClient]]:
    """A control plane of the test's own, ready for graphs in namespace default, and its administrator's client."""
    own_api_server.install_crds()
    account = {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": "default", "namespace": "default"},
    }
    own_api_server.apply(account)
    made = await KubeClient.connect(kubeconfig=own_api_server.kubeconfig, rng=random.Random(1))
    yield own_api_server, made
    await made.close()


@pytest.fixture
async def serving(own: tuple[ControlPlane, KubeClient], tmp_path: Path) -> AsyncIterator[Serving]:
    """A small graph of real processes under load."""
    plane, client = own
    async with served(plane, client, tmp_path) as made:
        yield made


@pytest.fixture
async def proxy(crds: ControlPlane) -> AsyncIterator[FaultyProxy]:
    """A proxy before the API server that fails as it is told."""
    async with FaultyProxy(crds, random.Random(7)) as made:
        yield made


@pytest.fixture
async def shaky(proxy: FaultyProxy, tmp_path: Path) -> AsyncIterator[KubeClient]:
    """A client that goes through the proxy."""
    path = proxy.kubeconfig(tmp_path / "proxy.kubeconfig")
    made = await KubeClient.connect(kubeconfig=path, rng=random.Random(2))
    yield made
    await made.close()


@pytest.fixture
async def world(
    crds: ControlPlane, client: KubeClient, namespace: str, tmp_path: Path
) -> AsyncIterator[World]:
    """A namespace for planners, in which somebody makes the pods that are wished for."""
    made = World(client, namespace, tmp_path)
    await made.start()
    operator = asyncio.create_task(made.operate())
    yield made
    operator.cancel()
    await asyncio.wait({operator})
    await made.close()


def _need(*names: str) -> None:
    absent = [name for name in names if not Path(asset(name)).is_file()]
    if absent:
        pytest.skip(f"KUBEBUILDER_ASSETS: no {', '.join(absent)}")
