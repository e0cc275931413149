"""`penstock demo`: the whole main job on this machine, ending by itself with a report."""

from __future__ import annotations

import signal
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import click
import yaml

from penstock.api.manifests import load_graph
from penstock.cli import fields
from penstock.cli.demo_run import DemoOptions, run_demo
from penstock.core.http.loop import run
from penstock.report.findings import require_plots
from penstock.router.policy.registry import policy_names


@click.command()
@click.option(
    "--manifest",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    help="Graph to run instead of the demo's own.  [default: twelve simulated H100s]",
)
@click.option(
    "--policy",
    type=click.Choice(policy_names()),
    help="How the router chooses a worker.  [default: the manifest's]",
)
@fields.options(DemoOptions)
def demo(manifest: Path | None, policy: str | None, **options: Any) -> None:
    """Start a graph, replay real requests over two short days, let the planner scale it, stop it, and report.

    Real local processes, simulated engines: no GPU and no cluster. Times are simulated seconds. Ctrl-C stops the
    graph and reports what was measured so far; a second one leaves the report out.
    """
    require_plots()
    own_manifest = resources.files("penstock.cli") / "data" / "demo.yaml"
    with resources.as_file(own_manifest) as packaged, tempfile.TemporaryDirectory() as folder:
        chosen = manifest or packaged
        if policy is not None:
            chosen = with_policy(chosen, policy, Path(folder))
        demo_options = fields.take(DemoOptions, options, manifest=chosen)
        is_complete = run(lambda stop: run_demo(demo_options, stop))
    if not is_complete:
        sys.exit(128 + signal.SIGINT)


def with_policy(manifest: Path, policy: str, folder: Path) -> Path:
    """Write the graph of ``manifest`` with another router policy into ``folder``; return the new file.

    Raises:
        InvalidSpecError: the manifest has problems.
    """
    plain = load_graph(manifest).to_manifest()
    plain["spec"].setdefault("router", {})["policy"] = policy
    path = folder / manifest.name
    path.write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
    return path
