"""`penstock pool`: who of a machine's GPU pool holds, wants and waits."""

from __future__ import annotations

from dataclasses import asdict

import click
from rich.console import Group
from rich.table import Table
from rich.text import Text

from penstock.cli import option
from penstock.cli.say import say_json
from penstock.cli.terminal import printer
from penstock.core.errors import ConfigError, NotFoundError
from penstock.local.pool import PoolStore


@click.command()
@click.argument("name", required=False)
@option.as_json("Print it as JSON.")
def pool(*, name: str | None, as_json: bool) -> None:
    """Show what each graph of the GPU pool NAME holds, may hold, wants, and for whose GPUs it waits.

    Without NAME: the only pool of this machine.
    """
    store = _chosen(name)
    found, rows = store.read(), store.rows()
    if as_json:
        say_json({"name": found.name, "gpus": found.gpus, "graphs": [asdict(row) for row in rows]})
        return
    table = Table(box=None, padding=(0, 1, 0, 0))
    for place, column in enumerate(
        ("graph", "guaranteed", "holds", "may hold", "wants", "gets", "waits for")
    ):
        table.add_column(column, justify="left" if place in {0, 6} else "right", overflow="fold")
    for row in rows:
        numbers = (row.guaranteed, row.held, row.grant, row.wanted, row.target)
        table.add_row(row.graph, *map(str, numbers), ", ".join(row.waits_for))
    held = sum(row.held for row in rows)
    printer().print(
        Group(table, Text(f"pool {found.name}: {found.gpus} GPUs, {held} held, {found.gpus - held} free"))
    )


def _chosen(name: str | None) -> PoolStore:
    if name is not None:
        return PoolStore.of(name)
    known = PoolStore.all()
    if not known:
        raise NotFoundError(
            "no GPU pool is on this machine; start one with `penstock up FILE... --pool FILE`"
        )
    if len(known) > 1:
        names = ", ".join(each.path.stem for each in known)
        raise ConfigError(f"NAME: needed, because several pools are here: {names}")
    return known[0]
