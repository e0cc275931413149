"""Entry point of the `penstock` command; subcommands are imported only when they run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click
from click.shell_completion import CompletionItem, get_completion_class

from penstock.cli.say import say
from penstock.core import logs
from penstock.core.closest import did_you_mean
from penstock.core.errors import ConfigError, PenstockError
from penstock.core.flags import MEANT_FLAGS, RENAMED_FLAGS
from penstock.core.printable import printable_lines
from penstock.local.start_marker import StartMarker

_SUBCOMMANDS = {
    "up": ("penstock.cli.local:up", "Start a graph's processes on this machine."),
    "load": ("penstock.cli.load:load", "Replay a trace against a running graph."),
    "restart": (
        "penstock.cli.local:restart",
        "Restart a graph's router with edited settings; no request is lost.",
    ),
    "status": ("penstock.cli.local:status", "Show workers, GPUs, queues and the last decisions."),
    "down": ("penstock.cli.local:down", "Drain and stop a graph started by `up`."),
    "pool": ("penstock.cli.pool:pool", "Show which graphs of a GPU pool hold, want or wait for GPUs."),
    "demo": ("penstock.cli.demo:demo", "Serve, scale and report on a slice of a real trace."),
    "simulate": ("penstock.cli.simulate:simulate", "Score router policies and the planner in virtual time."),
    "trace": ("penstock.cli.trace:trace", "Inspect or convert a trace."),
    "profile": (
        "penstock.cli.profile:profile",
        "Measure engines, and recommend sizes that meet TTFT and ITL targets.",
    ),
    "capacity": (
        "penstock.cli.capacity:capacity",
        "Plan the replicas, GPUs and cost of a load from a profile.",
    ),
    "assess": (
        "penstock.cli.assess:assess",
        "Estimate what Penstock would save, from a Prometheus that you already have.",
    ),
    "report": ("penstock.cli.report:report", "Draw a report from a load run and a planner ledger."),
    "samples": ("penstock.cli.samples:samples", "List the sample manifests, or print one."),
    "validate": ("penstock.cli.graph:validate", "Check manifests; print every problem at once."),
    "render": ("penstock.cli.graph:render", "Print the processes that a graph becomes."),
    "import": ("penstock.cli.graph:import_", "Convert a DynamoGraphDeployment to a GraphDeployment."),
    "router": ("penstock.cli.router:router", "Run the router."),
    "planner": ("penstock.cli.planner:planner", "Run the planner, or explain and replay its decisions."),
    "dashboard": (
        "penstock.cli.dashboard:dashboard",
        "Open the planner's TensorBoard, on this machine or a cluster.",
    ),
    "make-model": (
        "penstock.cli.make_model:make_model",
        "Write a small model with random weights for trying real engines.",
    ),
    "engine": ("penstock.cli.engine:engine", "Run a simulated worker."),
    "operator": ("penstock.cli.operator:operator", "Run the Kubernetes operator."),
    "doctor": (
        "penstock.cli.doctor:doctor",
        "Check a cluster or this machine; every finding has a remedy.",
    ),
    "completion": ("penstock.cli.main:completion", "Print the completion script of a shell."),
}


@contextmanager
def _printable_errors() -> Iterator[None]:
    """Show arguments and files' names that an error of usage repeats without control characters."""
    try:
        yield
    except click.NoSuchOption as exc:
        renamed = RENAMED_FLAGS.get(exc.option_name)
        if renamed is not None:
            raise click.UsageError(f"{exc.option_name}: no longer an option; {renamed}", exc.ctx) from exc
        known = set() if exc.ctx is None else {name for each in exc.ctx.command.params for name in each.opts}
        meant = next((each for each in MEANT_FLAGS.get(exc.option_name, ()) if each in known), None)
        if meant is not None:
            raise click.UsageError(f"{exc.option_name}: no such option; write {meant}", exc.ctx) from exc
        vars(exc)["message"] = printable_lines(exc.message)
        raise
    except click.ClickException as exc:
        vars(exc)["message"] = printable_lines(exc.message)
        raise


class _LazyGroup(click.Group):
    """Lists subcommands without importing them, so that `penstock --help` stays quick."""

    def make_context(self, *arguments: Any, **named: Any) -> click.Context:
        with _printable_errors():
            return super().make_context(*arguments, **named)

    def invoke(self, ctx: click.Context) -> Any:
        with _printable_errors():
            return super().invoke(ctx)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in _SUBCOMMANDS:
            ctx.fail(f"No such command {args[0]!r}{did_you_mean(args[0], _SUBCOMMANDS) or '.'}")
        if args[:1] == ["up"] and not ctx.resilient_parsing:
            ctx.obj = StartMarker()  # before the imports, so that `down` finds this start
            ctx.call_on_close(ctx.obj.close)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _SUBCOMMANDS:
            return None
        module, attribute = _SUBCOMMANDS[cmd_name][0].split(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        found = [
            CompletionItem(name, help=text)
            for name, (_, text) in _SUBCOMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in _SUBCOMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="penstock")
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
    envvar="PENSTOCK_LOG_LEVEL",
    help="Minimum severity of logs written to stderr.",
)
@click.option(
    "--log-json", is_flag=True, envvar="PENSTOCK_LOG_JSON", help="Write logs as JSON, one object per line."
)
def cli(log_level: str, log_json: bool) -> None:
    """Run disaggregated LLM serving: declare a graph, serve it, scale it inside a GPU budget."""
    logs.configure(log_level, as_json=log_json)


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(context: click.Context, shell: str) -> None:
    """Print the completion script for SHELL; let the shell read it at its start.

    Example: echo 'eval "$(penstock completion bash)"' >> ~/.bashrc
    """
    script = get_completion_class(shell)
    assert script is not None  # noqa: S101 - the choice names only click's own
    say(script(context.find_root().command, {}, "penstock", "_PENSTOCK_COMPLETE").source())


def _complain(error: PenstockError) -> None:
    say(f"penstock: {error}", err=True)


def main(argv: list[str] | None = None) -> None:
    """Run the command line; exit 0 done, 1 failure, 2 usage or configuration."""
    arguments: Any = argv
    try:
        cli.main(args=arguments, prog_name="penstock", standalone_mode=True)
    except ConfigError as exc:
        _complain(exc)
        sys.exit(2)
    except PenstockError as exc:
        _complain(exc)
        sys.exit(1)
    except importlib.import_module(
        "asyncio"
    ).CancelledError:  # evaluated only then; asyncio is slow to import
        # A second SIGTERM or SIGINT cut the orderly end short; 130 as after Ctrl-C.
        sys.exit(130)
