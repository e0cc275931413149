"""`penstock engine`: run a simulated worker, or list its latency profiles."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from penstock.cli import option
from penstock.core.http import loop
from penstock.engine import profiles
from penstock.engine.core.requests import EngineRole
from penstock.engine.serve.server import serve as run_worker
from penstock.engine.serve.settings import ServeFlags, resolve

_LIST_WIDTH = 150
"""Columns that the list of profiles needs; narrower terminals wrap its lines."""


@click.group()
def engine() -> None:
    """Run a simulated worker that speaks vLLM's HTTP API."""


@engine.command()
@click.argument("model")
@option.host()
@option.port(8000, "TCP port to listen on; 0 takes a free one.")
@click.option(
    "--kv-host",
    envvar="VLLM_NIXL_SIDE_CHANNEL_HOST",
    show_envvar=True,
    default=None,
    help="Address that decode workers reach this one at.  [default: --host]",
)
@click.option(
    "--role",
    type=click.Choice([role.value for role in EngineRole]),
    default=EngineRole.AGGREGATED.value,
    show_default=True,
    help="prefill keeps KV for decode workers, decode fetches it, aggregated does both phases alone.",
)
@click.option(
    "--profile",
    default="h200-llama-3.1-8b-tp1",
    show_default=True,
    help="Latency profile: a name from `penstock engine profiles`, or a .yaml file.",
)
@option.speed()
@click.option(
    "--served-model-name",
    "served_names",
    multiple=True,
    help="Name that requests use; may be repeated.  [default: MODEL]",
)
@click.option("--block-size", default=16, show_default=True, help="Tokens per KV block.")
@click.option(
    "--num-gpu-blocks-override", type=int, default=None, help="KV blocks.  [default: the profile's capacity]"
)
@click.option("--max-num-seqs", default=256, show_default=True, help="Requests in one batch.")
@click.option(
    "--max-num-batched-tokens",
    type=int,
    default=None,
    help="Tokens computed in one step.  [default: 8192, or --max-num-seqs if that is more]",
)
@click.option(
    "--max-model-len",
    type=int,
    default=None,
    help="Longest prompt plus output, tokens.  [default: what the KV cache holds, at most 131072]",
)
@click.option(
    "--enable-prefix-caching/--no-enable-prefix-caching",
    default=True,
    show_default=True,
    help="Reuse KV blocks of equal prefixes.",
)
@click.option("--stream-interval", default=1, show_default=True, help="Tokens per streamed event.")
@click.option(
    "--scheduling-policy",
    type=click.Choice(["fcfs", "priority"]),
    default="fcfs",
    show_default=True,
    help="Order of waiting requests; priority: lower values first, ties by arrival.",
)
@click.option(
    "--preemption-config",
    default=None,
    help="JSON: maxPerRequest, premiumReservedFraction, swapGigabytes, dropAboveSeconds, swapLinkGigabytesPerSecond "
    "(of one GPU), swapLinkLatencyMs. Waiting requests of lower priority values then preempt running ones of higher; "
    "needs --scheduling-policy priority.  [default: as vLLM]",
)
@click.option(
    "--kv-transfer-config",
    default=None,
    help="vLLM's JSON: kv_role, kv_load_failure_policy, kv_connector_extra_config.kv_lease_duration (seconds).",
)
@click.option(
    "--kv-events-config",
    default=None,
    help="vLLM's JSON: enable_kv_cache_events, endpoint, topic. Changes of the KV cache are then published over ZMQ; "
    "needs penstock[kv-events].",
)
@click.option(
    "--kv-link-gigabytes-per-second",
    "link_gigabytes_per_s",
    default=25.0,
    show_default=True,
    help="Bandwidth of the simulated incoming KV link.",
)
@click.option(
    "--kv-link-latency-ms",
    "link_latency_ms",
    default=5.0,
    show_default=True,
    help="Fixed time of each simulated KV transfer, milliseconds.",
)
@click.option(
    "--mean-output-tokens",
    default=256.0,
    show_default=True,
    help="Mean length at which the simulated model ends by itself, tokens; ignore_eos overrides it.",
)
@click.option(
    "--startup-seconds",
    "startup_s",
    default=0.0,
    show_default=True,
    help="Simulated seconds until the worker is ready; /health answers 503 until then.",
)
@click.option(
    "--prefill-speedup",
    default=1.0,
    show_default=True,
    help="Factor by which prompts are computed faster than the latency profile says: for measuring decode alone, whose prompts "
    "are computed beforehand.",
)
@click.option(
    "--engine-request-limit",
    type=int,
    default=None,
    help="Most requests in the engine at a time; beyond it and the queue requests are rejected with 503.  "
    "[default: no limit]",
)
@click.option(
    "--engine-request-queue",
    type=int,
    default=16,
    show_default=True,
    help="Most requests that wait for the engine once --engine-request-limit run; at least 2.",
)
@click.option("--seed", default=0, show_default=True, help="Chooses output lengths and words.")
def serve(role: str, **flags: Any) -> None:
    """Serve MODEL until SIGTERM, then drain: streams finish, pinned KV is read or expires."""
    settings = resolve(ServeFlags(role=EngineRole(role), **flags))
    try:
        loop.run(lambda stop: run_worker(settings, stop))
    except asyncio.CancelledError:
        click.echo("penstock: stopped by a second signal before the worker was drained", err=True)
        sys.exit(1)


@engine.command(name="profiles")
@option.as_json("Print JSON.")
def list_profiles(as_json: bool) -> None:
    """List the latency profiles with their sources and errors."""
    rows = [_row(profiles.load(name)) for name in profiles.names()]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table(box=None)
    for heading in ("name", "gpu", "model", "tp", "KV tokens", "prefill", "decode"):
        table.add_column(heading, no_wrap=True)
    for row in rows:
        capacity = f"{row['kv_capacity_tokens']}{'' if row['kv_capacity_is_measured'] else ' (derived)'}"
        table.add_row(
            row["name"],
            row["gpu"],
            row["model"],
            str(row["tensor_parallel"]),
            capacity,
            _quality(row["prefill"]),
            _quality(row["decode"]),
        )
    Console(width=max(shutil.get_terminal_size().columns, _LIST_WIDTH)).print(table)


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
        return "kernel sum, error not stated"
    return f"fit, error {part['mean_error']:.1%} (max {part['max_error']:.0%})"
