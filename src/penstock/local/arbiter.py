"""The background process of one running graph: ``python -m penstock.local.arbiter STATEFILE``.

Reads the first statefile from stdin, claims the namespace, and supervises until it is asked to stop: SIGTERM or SIGINT
drain and stop, a second one (or SIGQUIT) stops at once. However that ends, the children are ended and the statefile is
removed. Only SIGKILL leaves both: then its `Watchdog` becomes the next arbiter, ``--resume``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from penstock.core import logs
from penstock.core.errors import ConfigError, NotFoundError, PenstockError
from penstock.local import liveness, watchdog_child
from penstock.local.held_sockets import HeldSockets
from penstock.local.launcher import Launcher
from penstock.local.statefile import StateFile, from_json
from penstock.local.store import (
    StateStore,
    cache_folder,
    drop_cache,
    make_endpoints,
    make_folder,
    remove_endpoints,
)
from penstock.local.supervisor import Supervisor

_log = logs.get_logger(__name__)

_PERIOD_S = 0.2
"""Real seconds between two checks of it. Chosen."""
_END_S = 2.0
"""Real seconds that it may take to end. Chosen: it does nothing but exit."""


class Watchdog:
    """The process, from the arbiter's side."""

    def __init__(
        self, successor: Sequence[str], environment: Mapping[str, str], held: HeldSockets | None = None
    ) -> None:
        """Name what follows the arbiter, and what that takes over; nothing is started yet."""
        self._successor = list(successor)
        self._held = HeldSockets() if held is None else held
        self._environment = dict(environment)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """Return the newest process, or None before the first."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start it."""
        if self._process is not None:
            self._process.communicate()  # it has died
        descriptors = self._held.descriptors
        given = [f"--held={each}" for each in descriptors]
        self._process = subprocess.Popen(  # noqa: S603 - this interpreter, a module of this package
            [sys.executable, "-I", "-S", watchdog_child.__file__, *self._successor, *given],
            stdin=subprocess.PIPE,
            env=self._environment,
            start_new_session=True,
            pass_fds=descriptors,
        )

    async def keep(self) -> None:
        """Start it again whenever it has died, until cancelled."""
        while True:
            await asyncio.sleep(_PERIOD_S)
            if self._process is None or self._process.poll() is not None:
                _log.warning("watchdog started again")
                try:
                    self.start()
                except OSError as exc:
                    _log.warning("watchdog cannot be started", why=str(exc))

    def end(self) -> None:
        """Announce that the arbiter ends by itself, and wait until the process has ended. Never fails."""
        if self._process is not None:
            try:
                self._process.communicate(b"end", _END_S)
            except (
                subprocess.TimeoutExpired,
                ValueError,
            ):  # ValueError: it died, and no other could be started
                self._process.kill()
                self._process.wait()


RESUME_S = 600.0
"""Real seconds that a successor tries to take over. Chosen: long enough for a person to make room on a disk."""
RESUME_PERIOD_S = 1.0
DYING_S = 30.0
"""Real seconds that the killed arbiter may still be there: the kernel closes its pipes before it is gone, and on a busy
machine a process takes time to go. Chosen."""
_DRAIN_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_STRAY_GRACE_S = 1.0
"""Real seconds that a process gets to end which was started moments before its arbiter was killed. Chosen."""


def claim(store: StateStore, state: StateFile) -> StateFile:
    """Write the statefile with this process as its arbiter."""
    make_folder(store.path.parent)
    owned = _owned(store, state)
    try:
        store.claim(owned)
    except PenstockError:
        remove_endpoints(owned.arbiter.endpoint)
        raise
    return owned


def resume(store: StateStore, early: Sequence[int] = ()) -> StateFile:
    """Take over the statefile of an arbiter that was killed and may still be going.

    Tries for ten minutes where a full disk or a held lock forbids it, or until ``early`` names a signal to stop.
    """
    made: list[str] = []

    def take(state: StateFile) -> tuple[StateFile, StateFile]:
        if liveness.arbiter_is_alive(state):
            raise ConfigError(f"{store.path}: arbiter {state.arbiter.pid} runs; nothing to take over")
        remove_endpoints(state.arbiter.endpoint)
        owned = _owned(store, state)
        made.append(owned.arbiter.endpoint)
        owned = replace(owned, arbiter=replace(owned.arbiter, restarts=state.arbiter.restarts + 1))
        return owned, owned

    began_s = time.monotonic()
    while True:
        try:
            return store.update(take)
        except NotFoundError:
            raise
        except PenstockError as exc:
            while made:
                remove_endpoints(made.pop())
            waited_s = time.monotonic() - began_s
            if early or waited_s > RESUME_S or (waited_s > DYING_S and store.running() is not None):
                raise
            _log.warning("cannot take over yet", why=str(exc))
            time.sleep(RESUME_PERIOD_S)


def _owned(store: StateStore, state: StateFile) -> StateFile:
    me = liveness.identify(os.getpid())
    assert me is not None  # noqa: S101 - this process runs
    endpoint, pubsub_endpoint = make_endpoints(store.path, me.pid)
    arbiter = replace(
        state.arbiter, pid=me.pid, started=me.started, endpoint=endpoint, pubsub_endpoint=pubsub_endpoint
    )
    return replace(state, arbiter=arbiter)


def end_unrecorded(store: StateStore, state: StateFile, watchdog: Watchdog) -> None:
    """End the processes that a killed arbiter started and had no time to record: another will take their place."""
    orphans = [one for one in liveness.unrecorded(state, str(store.path)) if one.pid != watchdog.pid]
    if orphans:
        _log.warning("ending processes that were not recorded", pids=[one.pid for one in orphans])
        liveness.end(orphans, grace_s=_STRAY_GRACE_S)


async def supervise(
    store: StateStore, state: StateFile, watchdog: Watchdog, held: HeldSockets, early: Sequence[int] = ()
) -> None:
    """Run the graph of a claimed statefile until it is stopped; leave neither processes nor file behind.

    ``early`` are signals to stop that have come before this handles them.
    """
    launcher = Launcher(endpoint=state.arbiter.endpoint, pubsub_endpoint=state.arbiter.pubsub_endpoint)
    supervisor = Supervisor(store, launcher, state, held)
    loop = asyncio.get_running_loop()
    for number in _DRAIN_SIGNALS:
        loop.add_signal_handler(number, supervisor.request_stop)
    loop.add_signal_handler(signal.SIGQUIT, lambda: supervisor.request_stop(force=True))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the terminal that ran `penstock up` may go
    for received in early:
        supervisor.request_stop(force=received == signal.SIGQUIT)
    if state.arbiter.restarts:
        supervisor.adopt()
    try:
        await launcher.open(supervisor.request_stop)
        _log.info("arbiter started", namespace=state.arbiter.namespace, endpoint=state.arbiter.endpoint)
        keeping = asyncio.create_task(watchdog.keep())
        try:
            await supervisor.run()
        finally:
            keeping.cancel()
    finally:
        watchdog.end()
        await launcher.close()


def main(argv: list[str] | None = None) -> int:
    """Run the arbiter; 0 after an orderly stop, 1 after a failure."""
    parser = argparse.ArgumentParser(prog="penstock-arbiter", description="Background process of one graph.")
    parser.add_argument("statefile", type=Path, help="Statefile to own; its first content comes on stdin.")
    parser.add_argument("--resume", action="store_true", help="Take over from an arbiter that was killed.")
    parser.add_argument(
        "--held", type=int, action="append", default=[], help="File descriptor of a socket that it held."
    )
    options = parser.parse_args(argv)
    logs.configure()
    early: list[int] = []  # a stop between the claim and the supervisor must not leave the claim behind
    store = StateStore(options.statefile)
    try:
        # Nothing is claimed while it waits for its first state: a signal ends it at once.
        first = None if options.resume else _initial_state()
        for number in (*_DRAIN_SIGNALS, signal.SIGQUIT):
            signal.signal(number, lambda received, _frame: early.append(received))
        state = resume(store, early) if first is None else claim(store, first)
        if state.arbiter.discovery_folder is not None:
            make_folder(Path(state.arbiter.discovery_folder))
    except PenstockError as exc:
        _log.error("arbiter cannot start", why=str(exc))
        return 1
    try:
        successor = [sys.executable, "-m", liveness.ARBITER_MODULE, str(store.path), "--resume"]
        held = HeldSockets()
        held.take_over(options.held)
        held.hold(state.entries.values())
        watchdog = Watchdog(successor, {**os.environ, liveness.MARK_VARIABLE: str(store.path)}, held)
        watchdog.start()
        if options.resume:
            end_unrecorded(store, state, watchdog)
        asyncio.run(supervise(store, state, watchdog, held, early))
    except (PenstockError, OSError):
        _log.exception("arbiter failed")
        return 1
    finally:
        left = liveness.leftovers(store.read_quietly(), str(store.path))
        liveness.end(left, grace_s=1.0)
        if left:
            drop_cache(cache_folder(store.path.stem))
        remove_endpoints(state.arbiter.endpoint)
        store.remove()
        _log.info("arbiter ended", namespace=state.arbiter.namespace)
    return 0


def _initial_state() -> StateFile:
    """Return the statefile on stdin."""
    try:
        return from_json(json.load(sys.stdin), source="stdin")
    except ValueError as exc:
        raise ConfigError(f"stdin: not a statefile ({exc}); run `penstock up FILE`") from exc


if __name__ == "__main__":
    sys.exit(main())
