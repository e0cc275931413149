"""`penstock operator`: bring graphs about on a Kubernetes cluster."""

from __future__ import annotations

import types
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, Literal, TypeVar, get_args, get_origin

import click
import orjson

from penstock_core.errors import ConfigError
from penstock_operator.settings import OperatorSettings, settings_of
from penstock_wire import loop

F = TypeVar("F", bound=Callable[..., Any])

_SWITCHES = {
    "all_namespaces": "--all-namespaces/--one-namespace",
    "leader_election": "--leader-election/--no-leader-election",
}
_METAVARS = {"namespace": "NS", "kubeconfig": "FILE", "penstock_image": "IMAGE", "resync_interval": "SECONDS"}


def _options(function: F) -> F:
    """Add one flag per setting, with its environment variable; unset ones stay None."""
    for name, field in reversed(OperatorSettings.model_fields.items()):
        default = field.default
        shown = "none" if default is None else str(default).lower() if isinstance(default, bool) else default
        shared: dict[str, Any] = {
            "default": None,
            "envvar": f"PENSTOCK_OPERATOR_{name.upper()}",
            "show_envvar": True,
            "help": f"{field.description}  [default: {shown}]",
        }
        if name in _SWITCHES:
            option = click.option(_SWITCHES[name], name, **shared)
        elif get_origin(field.annotation) is Literal:
            choices = click.Choice(list(get_args(field.annotation)))
            option = click.option(_flag(name), name, type=choices, **shared)
        else:
            kind = _scalar(field.annotation)
            option = click.option(_flag(name), name, type=kind, metavar=_METAVARS.get(name), **shared)
        function = option(function)
    return function


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _scalar(annotation: Any) -> type:
    """Return int, float or str for a field's annotation."""
    if isinstance(annotation, types.UnionType):
        annotation = next(each for each in get_args(annotation) if each is not type(None))
    return annotation if annotation in {int, float} else str


@click.group()
def operator() -> None:
    """Bring GraphDeployments about on a Kubernetes cluster."""


@operator.command()
@click.option("--dry-run", is_flag=True, help="Print the options that would apply, as JSON, and stop.")
@_options
def run(*, dry_run: bool, **given: Any) -> None:
    """Reconcile graphs until SIGTERM. Options: flag > environment variable > default."""
    settings = settings_of(**given)
    if dry_run:
        click.echo(orjson.dumps(settings.model_dump(mode="json"), option=orjson.OPT_INDENT_2))
        return
    missing = [name for name in ("kopf", "kr8s") if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{', '.join(missing)}: not installed; the operator needs `pip install 'penstock[kubernetes]'`"
        )
    from penstock_operator.service import Service  # noqa: PLC0415 - imports kr8s

    loop.run(Service(settings).run)
