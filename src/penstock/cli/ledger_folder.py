"""Where a command finds a planner's ledger: in the folder that is given, or the running graph's."""

from __future__ import annotations

from pathlib import Path

import click

from penstock.cli.option import Option
from penstock.core.errors import ConfigError, NotFoundError

LOG_DIR: Option = click.option(
    "--log-dir",
    type=click.Path(path_type=Path),
    help="The planner's folder, or a ledger.  [default: the running graph's]",
)
NAMESPACE: Option = click.option(
    "--namespace", help="Graph on this machine, without --log-dir.  [default: the only one there is]"
)


def ledger_folder(log_dir: Path | None, namespace: str | None) -> Path:
    """Return ``log_dir``, or the folder of a running graph's planner.

    Raises:
        ConfigError: neither is there.
    """
    if log_dir is not None:
        return log_dir
    from penstock.local.down import choose_namespace  # noqa: PLC0415 - only where it is used
    from penstock.local.store import StateStore  # noqa: PLC0415 - only where it is used

    try:
        chosen = choose_namespace(namespace)
    except NotFoundError as exc:
        raise ConfigError("--log-dir: needed, because no graph is running on this machine") from exc
    state = StateStore.of(chosen).read()
    if state is None or state.arbiter.planner_log_dir is None:
        raise ConfigError(f"--namespace: {chosen!r} has no planner on this machine; give --log-dir")
    return Path(state.arbiter.planner_log_dir)
