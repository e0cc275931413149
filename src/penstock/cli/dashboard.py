"""`penstock dashboard`: opens TensorBoard on a planner's folder, or forwards the one that runs in a cluster."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from penstock.cli.planner_folder import ledger_folder
from penstock.cli.say import say
from penstock.core.errors import ClusterError, ConfigError, NotFoundError

_SELECTOR: Final = "app.kubernetes.io/part-of=penstock,app.kubernetes.io/component=tensorboard"

CHARTS: Final = "#custom_scalars&_smoothingWeight=0"
"""Where TensorBoard has the planner's charts. Smoothed by 0.6, as it does by itself, replicas would change along curves."""

KUBECTL_S: Final = 30.0
"""Real seconds that kubectl is waited for. Chosen: a cluster that takes longer needs a look first."""


@click.command()
@click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    help="The planner's log folder, or a parent folder of several.  [default: the running graph's]",
)
@click.option("--namespace", help="Graph on this machine; with --kubernetes: namespace of the Helm release.")
@click.option(
    "--kubernetes", is_flag=True, help="Forward a port to the TensorBoard that the chart runs in a cluster."
)
@click.option("--context", metavar="NAME", help="With --kubernetes: context of the kubeconfig to use.")
@click.option(
    "--port",
    type=click.IntRange(1, 65535),
    default=6006,
    show_default=True,
    help="TCP port on this machine.",
)
def dashboard(
    *, log_dir: Path | None, namespace: str | None, kubernetes: bool, context: str | None, port: int
) -> None:
    """Open the planner's dashboard, and serve it until Ctrl-C.

    Needs TensorBoard (pip install 'penstock[tensorboard]'), or with --kubernetes kubectl and the chart's value
    tensorboard.enabled.
    """
    if kubernetes and log_dir is not None:
        raise ConfigError("--log-dir: with --kubernetes the pod's folder is shown; remove one of the two")
    if context is not None and not kubernetes:
        raise ConfigError("--context: needs --kubernetes")
    command = (
        forward_command(namespace, context, port)
        if kubernetes
        else serve_command(ledger_folder(log_dir, namespace), port)
    )
    say(f"dashboard    http://localhost:{port}/{CHARTS}   (Ctrl-C ends it)")
    sys.stdout.flush()
    os.execvp(command[0], command)  # noqa: S606 - signals reach what serves


def serve_command(folder: Path, port: int) -> list[str]:
    """Return what shows a folder; raise `ConfigError` where there is nothing to show, or nothing to show it with."""
    if find_spec("tensorboard") is None:
        raise ConfigError("tensorboard: not installed; run pip install 'penstock[tensorboard]'")
    if next(folder.rglob("events.out.tfevents.*"), None) is None:
        raise ConfigError(
            f"--log-dir {folder}: has no dashboard yet; the planner writes it after it has observed "
            "its workers for the first time"
        )
    return [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--port", str(port)]


def forward_command(namespace: str | None, context: str | None, port: int) -> list[str]:
    """Return what forwards the chart's TensorBoard.

    Raises:
        ConfigError: kubectl is missing, or several installations have one.
        NotFoundError: none has.
        ClusterError: the cluster does not answer.
    """
    if shutil.which("kubectl") is None:
        raise ConfigError("--kubernetes: needs kubectl on PATH")
    kubectl = ["kubectl", *([] if context is None else ["--context", context])]
    where = ["--all-namespaces"] if namespace is None else ["--namespace", namespace]
    found = [
        (each["metadata"]["namespace"], each["metadata"]["name"], each["spec"]["ports"][0]["port"])
        for each in _asked([*kubectl, "get", "services", *where, "--selector", _SELECTOR, "-o", "json"])
    ]
    if not found:
        raise NotFoundError(
            "no TensorBoard runs in that namespace; enable it: helm upgrade --reuse-values --set "
            "planner.logs.size=5Gi --set tensorboard.enabled=true"
        )
    if len(found) > 1:
        names = ", ".join(sorted(each for each, *_ in found))
        raise ConfigError(f"--namespace: TensorBoard runs in {names}; choose one")
    ((inside, name, served),) = found
    return [*kubectl, "port-forward", "--namespace", inside, f"service/{name}", f"{port}:{served}"]


def _asked(command: list[str]) -> list[dict[str, Any]]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=KUBECTL_S)  # noqa: S603
    except subprocess.TimeoutExpired as exc:
        raise ClusterError(
            f"kubectl: no answer within {KUBECTL_S:g} s; check whether the cluster is up: kubectl "
            "cluster-info"
        ) from exc
    except subprocess.CalledProcessError as exc:
        raise ClusterError(f"kubectl: {exc.stderr.strip()}") from exc
    items: list[dict[str, Any]] = json.loads(done.stdout)["items"]
    return items
