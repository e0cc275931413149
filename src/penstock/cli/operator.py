"""`penstock operator`: bring graphs about on a Kubernetes cluster."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import click
from pydantic.fields import FieldInfo

from penstock.cli import fields, option
from penstock.cli.cluster import Connection, require_packages
from penstock.cli.say import say, say_json
from penstock.core.errors import ClusterError, ConfigError
from penstock.core.flags import flag, flag_of
from penstock.core.http import loop
from penstock.kube.objects.names import OPERATOR_CLASS
from penstock_operator.settings import OperatorSettings, settings_of

_SWITCHES = {
    "all_namespaces": "--all-namespaces/--one-namespace",
    "leader_election": "--leader-election/--no-leader-election",
}
_METAVARS = {
    "namespace": "NS",
    "operator_class": "NAME",
    "kubeconfig": "FILE",
    "penstock_image": "IMAGE",
    "resync_interval": "SECONDS",
    "allow_pod_templates": "LIST",
    "pod_template_profiles": "LIST",
    "gpu_resources": "LIST",
}


def _shape(name: str, field: FieldInfo) -> tuple[str, dict[str, Any]]:
    if name in _SWITCHES:
        return _SWITCHES[name], {}
    kind = field.annotation if field.annotation in {int, float} else str
    return flag_of(name), {"type": option.choices_of(field) or kind, "metavar": _METAVARS.get(name)}


@click.group()
def operator() -> None:
    """Run GraphDeployments on a Kubernetes cluster."""


@operator.command()
@click.option("--dry-run", is_flag=True, help="Print the options that would apply, as JSON, and stop.")
@option.of_settings(OperatorSettings.model_fields, "PENSTOCK_OPERATOR", _shape)
def run(*, dry_run: bool, **given: Any) -> None:
    """Reconcile graphs until SIGTERM. Options: flag > environment variable > default."""
    settings = settings_of(**given)
    if dry_run:
        say_json(settings.model_dump(mode="json"))
        return
    require_packages("penstock operator", "kopf", "kubernetes")
    from penstock_operator.service import OperatorService  # noqa: PLC0415 - imports the Kubernetes client

    loop.run(OperatorService(settings).run)


@dataclass(frozen=True, slots=True)
class FinishOptions:
    """Which drains are waited for, and for how long."""

    namespace: tuple[str, ...] = flag("Namespace with graphs.", short=("-n",), metavar="NAME", default=())
    all_namespaces: bool = flag("Include the graphs of every namespace.", short=("-A",), default=False)
    operator_class: str = flag(
        "Include only graphs with this spec.operatorClass.", metavar="NAME", default=OPERATOR_CLASS
    )
    timeout: float = flag(
        "Maximum wait, in seconds; drains that are still pending then are abandoned.", default=240.0, ge=0
    )
    connection: Connection = field(default_factory=Connection)


@operator.command(name="finish-drains")
@fields.options(FinishOptions)
def finish(**given: Any) -> None:
    """Wait until deleted graphs are drained, before the operator is uninstalled; then remove the finalizers that are left.

    The chart runs it as a pre-delete hook, while the operator still works.
    """
    said = fields.take(FinishOptions, given)
    if said.all_namespaces == bool(said.namespace):
        raise ConfigError("give either --namespace, once or several times, or --all-namespaces")
    require_packages("penstock operator", "kopf", "kubernetes")
    from penstock_operator.departure import finish_drains  # noqa: PLC0415 - imports the Kubernetes client

    async def finished() -> bool:
        async with said.connection.open() as client:
            return await finish_drains(
                client,
                said.namespace or (None,),
                operator_class=said.operator_class,
                limit_s=said.timeout,
                print_line=say,
            )

    if not asyncio.run(finished()):
        raise ClusterError("finalizers are left; the log names the command that removes each")
