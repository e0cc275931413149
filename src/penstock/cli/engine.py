"""`penstock engine`: run a simulated worker, or list its latency profiles."""

from __future__ import annotations

import asyncio
import shutil
import sys
from typing import Any

import click

from penstock.cli import fields, option
from penstock.cli.say import say, say_json
from penstock.cli.terminal import Terminal, table
from penstock.core.http import loop
from penstock.core.tracing import open_tracing
from penstock.engine import profiles
from penstock.engine.serve.server import serve as run_worker
from penstock.engine.serve.settings import ServeFlags, resolve

_LIST_WIDTH = 150
"""Columns that the list of profiles needs; narrower terminals wrap its lines."""


@click.group()
def engine() -> None:
    """Run a simulated worker that speaks vLLM's HTTP API."""


@engine.command()
@click.argument("model")
@fields.options(ServeFlags)
def serve(model: str, **options: Any) -> None:
    """Serve MODEL until SIGTERM, then drain: finish the streams, and wait until pinned KV has been read or has expired."""
    settings = resolve(fields.take(ServeFlags, options, model=model))
    try:
        loop.run(lambda stop: run_worker(settings, stop, open_tracing("penstock-engine")))
    except asyncio.CancelledError:
        say("penstock: stopped by a second signal before the worker was drained", err=True)
        sys.exit(1)


@engine.command(name="profiles")
@option.as_json("Print JSON.")
def list_profiles(as_json: bool) -> None:
    """List the latency profiles with their sources and their fit errors."""
    rows = [_row(profiles.load(name)) for name in profiles.names()]
    if as_json:
        say_json(rows)
        return
    found = table(
        ("name", "gpu", "model", "tp", "KV tokens", "prefill", "decode"), map(_cells, rows), no_wrap=True
    )
    Terminal(width=max(shutil.get_terminal_size().columns, _LIST_WIDTH)).print(found)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    capacity = f"{row['kv_capacity_tokens']}{'' if row['kv_capacity_is_measured'] else ' (derived)'}"
    quality = (_quality(row["prefill"]), _quality(row["decode"]))
    return (row["name"], row["gpu"], row["model"], str(row["tensor_parallel"]), capacity, *quality)


def _row(profile: profiles.Profile) -> dict[str, Any]:
    return {
        "name": profile.name,
        "gpu": profile.gpu,
        "model": profile.model,
        "precision": profile.precision,
        "tensor_parallel": profile.tensor_parallel,
        "kv_bytes_per_token": profile.kv.bytes_per_token,
        "kv_capacity_tokens": profile.kv_capacity_tokens,
        "kv_capacity_is_measured": profile.kv.measured_tokens is not None,
        "kv_source": profile.kv.source,
        "prefill": profile.prefill.model_dump(include={"kind", "source", "mean_error", "max_error"}),
        "decode": profile.decode.model_dump(include={"kind", "source", "mean_error", "max_error"}),
    }


def _quality(part: dict[str, Any]) -> str:
    if part["kind"] == "table":
        return "measured points"
    if part["mean_error"] is None:
        return "sum of kernel times, error unknown"
    return f"fit, error {part['mean_error']:.1%} (max {part['max_error']:.0%})"
