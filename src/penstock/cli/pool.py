"""`penstock pool`: who of a machine's, a namespace's or a cluster's GPU pool holds, wants and waits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock.cli import fields, option
from penstock.cli.cluster import Connection, require_packages
from penstock.cli.say import say_json
from penstock.cli.terminal import printer
from penstock.core.errors import ConfigError, NotFoundError
from penstock.core.flags import flag
from penstock.core.printable import printable
from penstock.gpu_pool.waiting import PoolRow, holdings_from_status, pool_rows
from penstock.local.pool import PoolStore

FoundT = TypeVar("FoundT")


@dataclass(frozen=True, slots=True)
class PoolOptions:
    """Where the pool is."""

    namespace: str | None = flag(
        "Show a GpuPool in this namespace of a cluster.",
        short=("-n",),
        metavar="NAMESPACE",
        unset="a pool of this machine",
    )
    all_namespaces: bool = flag("Show a ClusterGpuPool.", short=("-A",), default=False)
    connection: Connection = field(default_factory=Connection)


@dataclass(frozen=True, slots=True)
class _Shown:
    name: str
    gpus: int
    graphs: Sequence[PoolRow]
    problems: tuple[str, ...] = ()


@click.command()
@click.argument("name", required=False)
@fields.options(PoolOptions)
@option.as_json("Print it as JSON.")
def pool(*, name: str | None, as_json: bool, **given: Any) -> None:
    """Show what each graph of the GPU pool NAME holds, may hold and wants, and which graphs' GPUs it waits for.

    Without NAME: the only pool of this machine, with --namespace the only pool of that namespace, and with
    --all-namespaces the only ClusterGpuPool.
    """
    said = fields.take(PoolOptions, given)
    if said.namespace is not None and said.all_namespaces:
        raise ConfigError(
            "--namespace, --all-namespaces: the first selects a GpuPool, the second a ClusterGpuPool; "
            "give only one"
        )
    is_local = said.namespace is None and not said.all_namespaces
    if is_local and said.connection != Connection():
        raise ConfigError(
            "--kubeconfig, --context: apply only to a cluster; add --namespace or --all-namespaces"
        )
    found = _local(name) if is_local else asyncio.run(_of_cluster(name, said))
    if as_json:
        wrong = {"problems": found.problems} if found.problems else {}
        graphs = [asdict(row) for row in found.graphs]
        say_json({"name": found.name, "gpus": found.gpus, "graphs": graphs, **wrong})
        return
    table = Table(box=None, padding=(0, 1, 0, 0))
    for place, column in enumerate(
        ("graph", "guaranteed", "holds", "may hold", "wants", "gets", "waits for")
    ):
        table.add_column(column, justify="left" if place in {0, 6} else "right", overflow="fold")
    for row in found.graphs:
        numbers = (row.guaranteed, row.held, row.grant, row.wanted, row.target)
        table.add_row(row.graph, *map(str, numbers), ", ".join(row.waits_for))
    held = sum(row.held for row in found.graphs)
    text = f"pool {found.name}: {found.gpus} GPUs, {held} held, {max(0, found.gpus - held)} free"
    problems = [Text(each, style="yellow") for each in found.problems]
    printer().print(Group(table, Text(text), *problems))


def _local(name: str | None) -> _Shown:
    store = _chosen(name)
    found = store.read()
    return _Shown(found.name, found.gpus, store.rows(), tuple(store.cuts()))


async def _of_cluster(name: str | None, said: PoolOptions) -> _Shown:
    require_packages("penstock pool of a cluster", "kubernetes")
    from penstock.kube.kinds import CLUSTER_GPU_POOL, GPU_POOL  # noqa: PLC0415 - the extra may be absent

    kind = CLUSTER_GPU_POOL if said.all_namespaces else GPU_POOL
    async with said.connection.open() as client:
        if name is not None:
            found = await client.get(kind, name, namespace=said.namespace)
        else:
            known = list((await client.list(kind, namespace=said.namespace)).items)
            if not known and said.all_namespaces:
                raise NotFoundError(
                    "the cluster has no ClusterGpuPool; apply one, or give --namespace for a GpuPool"
                )
            if not known:
                raise NotFoundError(
                    f"namespace {said.namespace} has no GpuPool; apply one, or look for others with "
                    "kubectl get gpool -A and penstock pool --all-namespaces"
                )
            found = _only(known, [each["metadata"]["name"] for each in known])
    found = printable(found)
    status = found.get("status") or {}
    wrong = [each["message"] for each in status.get("conditions") or () if each.get("status") == "False"]
    if status.get("observedGeneration", 0) < 1:
        wrong.append(_unseen(found["metadata"]["name"], is_of_cluster=said.all_namespaces))
    total = (status.get("gpus") or {}).get("total", found["spec"].get("gpus", 0))
    return _Shown(found["metadata"]["name"], total, pool_rows(holdings_from_status(status)), tuple(wrong))


def _unseen(name: str, *, is_of_cluster: bool) -> str:
    if is_of_cluster:
        return (
            f"ClusterGpuPool {name} is not managed by any operator: it needs one for all namespaces "
            "(the chart's clusterWide) with its spec.operatorClass"
        )
    return (
        f"GpuPool {name} is not managed by any operator: it needs one for its namespace with its "
        "spec.operatorClass"
    )


def _chosen(name: str | None) -> PoolStore:
    if name is not None:
        return PoolStore.of(name)
    known = PoolStore.all()
    if not known:
        raise NotFoundError(
            "no GPU pool runs on this machine; start one with `penstock up FILE... --pool FILE`, or "
            "give --namespace for a cluster"
        )
    return _only(known, [each.path.stem for each in known])


def _only(known: Sequence[FoundT], names: Sequence[str]) -> FoundT:
    if len(known) > 1:
        raise ConfigError(f"NAME: required, because there are several pools: {', '.join(sorted(names))}")
    return known[0]
