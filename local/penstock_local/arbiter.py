"""The background process of one running graph: ``python -m penstock_local.arbiter STATEFILE``.

Reads the initial statefile from stdin, claims the namespace, and supervises until it is told to stop:
SIGTERM or SIGINT drain and stop, a second one (or SIGQUIT) stops at once. However the loop ends, the
children are ended and the statefile is removed; only SIGKILL leaves the file, and then the kernel sends
the children SIGTERM (see `exec_child`) and the next `penstock up` or `penstock down` clears up.

circus runs on tornado, tornado on asyncio: the running asyncio loop is handed to circus, whose arbiter then
neither starts nor stops it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

from penstock_core import logs
from penstock_core.errors import PenstockError
from penstock_local import liveness
from penstock_local.launcher import Launcher
from penstock_local.plan import Supervision
from penstock_local.ports import ephemeral_port
from penstock_local.statefile import StateFile
from penstock_local.statefile_json import from_json
from penstock_local.store import StateStore
from penstock_local.supervisor import Supervisor

_log = logs.get_logger(__name__)


def claim(store: StateStore, state: StateFile) -> StateFile:
    """Write the statefile with this process as its arbiter.

    Args:
        store: Where.
        state: Initial content.

    Returns:
        What was written.

    Raises:
        ConfigError: another arbiter of the namespace runs.
    """
    me = liveness.identify(os.getpid())
    assert me is not None  # noqa: S101 - this process runs
    owned = replace(
        state,
        arbiter=replace(
            state.arbiter,
            pid=me.pid,
            create_time=me.create_time,
            endpoint=f"tcp://127.0.0.1:{ephemeral_port()}",
            pubsub_endpoint=f"tcp://127.0.0.1:{ephemeral_port()}",
        ),
    )
    store.claim(owned)
    return owned


async def supervise(store: StateStore, state: StateFile, figures: Supervision) -> None:
    """Run the graph of a claimed statefile until it is stopped; leave neither processes nor file behind."""
    launcher = Launcher(endpoint=state.arbiter.endpoint, pubsub_endpoint=state.arbiter.pubsub_endpoint)
    supervisor = Supervisor(store, launcher, state, figures)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.request_stop)
    loop.add_signal_handler(signal.SIGQUIT, lambda: supervisor.request_stop(force=True))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal that ran `penstock up` may go
    try:
        await launcher.open(supervisor.request_stop)
        _log.info("arbiter started", namespace=state.arbiter.namespace, endpoint=state.arbiter.endpoint)
        await supervisor.run()
    finally:
        await launcher.close()


def main(argv: list[str] | None = None) -> int:
    """Run the arbiter; 0 after an orderly stop, 1 after a failure."""
    parser = argparse.ArgumentParser(prog="penstock-arbiter", description="Background process of one graph.")
    parser.add_argument("statefile", type=Path, help="Statefile to own; its first content comes on stdin.")
    parser.add_argument("--log-level", default="info", help="debug, info, warning or error.")
    options = parser.parse_args(argv)
    logs.configure(options.log_level)
    store = StateStore(options.statefile)
    try:
        state = claim(store, from_json(json.load(sys.stdin), source="stdin"))
    except PenstockError as exc:
        _log.error("arbiter cannot start", why=str(exc))
        return 1
    try:
        asyncio.run(supervise(store, state, Supervision()))
    except (PenstockError, OSError):
        _log.exception("arbiter failed")
        return 1
    finally:
        liveness.end(liveness.leftovers(store.read_quietly(), str(store.path)), grace_s=1.0)
        store.remove()
        _log.info("arbiter ended", namespace=state.arbiter.namespace)
    return 0


if __name__ == "__main__":
    sys.exit(main())
