"""Where a planner's ledger lies, by what a command was given: `penstock planner` and `penstock dashboard` use it."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli import option
from penstock.core.errors import ConfigError, NotFoundError

LOG_DIR: option.Option = click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    help="The planner's log folder, or a ledger file.  [default: the running graph's folder]",
)
NAMESPACE: option.Option = click.option(
    "--namespace", help="Graph on this machine; use it without --log-dir.  [default: the only graph]"
)


def ledger_folder(log_dir: Path | None, namespace: str | None) -> Path:
    """Return ``log_dir``, or the folder of a running graph's planner; with neither raise `ConfigError`."""
    if log_dir is not None:
        return log_dir
    from penstock.local.down import choose_namespace  # noqa: PLC0415 - only where it is used
    from penstock.local.store import StateStore  # noqa: PLC0415 - only where it is used

    try:
        chosen = choose_namespace(namespace)
    except NotFoundError as exc:
        raise ConfigError("--log-dir: required, because no graph is running on this machine") from exc
    state = StateStore.of(chosen).read()
    if state is None:
        raise NotFoundError(
            f"namespace {chosen!r}: not running; start it with `penstock up FILE`, or give --log-dir"
        )
    if state.arbiter.planner_log_dir is None:
        raise ConfigError(f"--namespace: {chosen!r} has no planner on this machine; give --log-dir")
    return Path(state.arbiter.planner_log_dir)
