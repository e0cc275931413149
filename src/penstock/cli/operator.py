"""`penstock operator`: bring graphs about on a Kubernetes cluster."""

from __future__ import annotations

from typing import Any

import click
from pydantic.fields import FieldInfo

from penstock.cli import option
from penstock.cli.cluster import require_packages
from penstock.cli.say import say_json
from penstock.core.flags import flag_of
from penstock.core.http import loop
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
