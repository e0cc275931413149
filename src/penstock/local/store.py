"""The local state on disk: folders of one user, the statefile with its lock and atomic replacement, circus' sockets alongside it.

Writers hold an exclusive `flock` on ``<namespace>.json.lock`` for the milliseconds of one edit; readers take none. What
another user owns or may write is refused: a statefile holds commands that the arbiter runs and variables that may be
secrets, and circus' sockets run any command.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, Final, TypeVar

from penstock.core.errors import ConfigError, ConflictError, NotFoundError, unwritable
from penstock.core.local_state import STATE_DIR_VARIABLE, make_private, state_dir
from penstock.local.liveness import arbiter_is_alive, arbiters_of
from penstock.local.statefile import ProcessId, StateFile, from_json, to_json
from penstock.runtimes import DISCOVERY_SUFFIX, KV_EVENTS_SUFFIX, KV_REPLAY_SUFFIX

LOCK_TIMEOUT_S = 5.0
"""Real seconds. Chosen: an edit takes milliseconds, so a longer hold is a stuck process."""

REPAIR_S = 1.0
"""Real seconds. Chosen: an arbiter that runs replaces a broken file within a tick of 0.1 s."""
_REPAIR_POLL_S = 0.05

_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_T = TypeVar("_T")


def log_root() -> Path:
    """Return the folder of all logs: ``log`` in the configured state folder, or ``~/.penstock/log``."""
    configured = os.environ.get(STATE_DIR_VARIABLE)
    return Path(configured).expanduser() / "log" if configured else Path.home() / ".penstock" / "log"


def cache_folder(namespace: str) -> Path:
    """Return the folder of what a graph's engines compile: below ``cache`` in the configured state folder, or ``~/.penstock``."""
    configured = os.environ.get(STATE_DIR_VARIABLE)
    return (
        (Path(configured).expanduser() if configured else Path.home() / ".penstock").absolute()
        / "cache"
        / namespace
    )


def drop_cache(folder: Path) -> None:
    """Delete what an engine compiled that did not end by itself: it may have been writing."""
    shutil.rmtree(folder, ignore_errors=True)


def namespaces() -> list[str]:
    """Return the namespaces that have a statefile, sorted."""
    return sorted(path.stem for path in state_dir().glob("*.json"))


SOCKET_PATH_BYTES: Final = 107
"""Longest path of a Unix socket on Linux: ``sun_path`` less its end (unix(7))."""

_OWNER_ONLY: Final = 0o700
FILE_MODE: Final = 0o600
"""Mode of files that belong to this user alone."""
_WRITE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
_CONTROL, _EVENTS = "control", "events"
_SCHEME: Final = "ipc://"


def make_folder(path: Path) -> None:
    """Make a folder, and parents that are missing, for this user alone; check one that exists."""
    try:
        make_private(path)
        _check_owner(path, path.stat())
    except OSError as exc:
        raise ConfigError(
            f"{unwritable(str(path), exc)}: set {STATE_DIR_VARIABLE}, or --log-dir for logs"
        ) from exc


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Refuse a file or folder that this user does not own alone."""
    user = os.geteuid()
    if status.st_uid != user:
        raise ConfigError(
            f"{path}: belongs to user {status.st_uid}, not to user {user} who runs this; "
            f"use a folder of your own: set {STATE_DIR_VARIABLE}, or --log-dir for logs"
        )
    if status.st_mode & _WRITE_BY_OTHERS:
        mode = stat.S_IMODE(status.st_mode)
        raise ConfigError(
            f"{path}: mode {mode:04o} lets other users write it; run: chmod go-w {path} "
            "(and check what it holds before you trust it)"
        )


def read_own(path: Path) -> bytes:
    """Return the content of a regular file that this user owns alone; follows no link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: not a regular file; delete it")
        _check_owner(path, status)
        return file.read()


def make_endpoints(statefile: Path, pid: int) -> tuple[str, str]:
    """Make a folder that only this user may enter, and return circus' control and event endpoints in it.

    It is alongside the statefile, or in the folder for temporary files where that path would be too long.
    """
    folder = statefile.with_name(f"{statefile.stem}.{pid}.run")
    try:
        if _fits(folder):
            remove_endpoints(_SCHEME + str(folder / _CONTROL))
            folder.mkdir(mode=_OWNER_ONLY)
        else:
            folder = Path(tempfile.mkdtemp(prefix="penstock-"))
    except OSError as exc:
        raise ConfigError(
            f"{folder}: cannot be made: {exc.strerror}; delete it, or make its parent writable"
        ) from exc
    if not _fits(folder):
        folder.rmdir()
        raise ConfigError(
            f"{folder}/{_CONTROL}: {len(os.fsencode(folder / _CONTROL))} bytes, but a Unix socket's path has at most "
            f"{SOCKET_PATH_BYTES}; set TMPDIR or {STATE_DIR_VARIABLE} to a shorter path"
        )
    return _SCHEME + str(folder / _CONTROL), _SCHEME + str(folder / _EVENTS)


def remove_endpoints(endpoint: str) -> None:
    """Delete the sockets and the folder that `make_endpoints` made; does nothing if they do not exist."""
    if endpoint.startswith(_SCHEME):
        folder = Path(endpoint.removeprefix(_SCHEME)).parent
        with contextlib.suppress(OSError):
            for name in (_CONTROL, _EVENTS):
                (folder / name).unlink(missing_ok=True)
            folder.rmdir()


def remove_all_endpoints(statefile: Path) -> None:
    """Delete all socket folders next to a statefile whose arbiter has ended, including those it does not name."""
    for folder in statefile.parent.glob(f"{statefile.stem}.[0-9]*.run"):
        remove_endpoints(_SCHEME + str(folder / _CONTROL))


def _fits(folder: Path) -> bool:
    return len(os.fsencode(folder / _CONTROL)) <= SOCKET_PATH_BYTES


class UnwritableError(ConfigError):
    """The statefile cannot be written, as on a full disk; the old content stays."""


def replace_file(path: Path, text: str) -> None:
    """Replace a file of the state folder atomically; raises `UnwritableError`."""
    temporary = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=path.name, suffix=".tmp", delete=False, encoding="utf-8"
        ) as file:
            temporary = file.name
            file.write(text)
        os.replace(temporary, path)  # noqa: PTH105 - one system call on two plain names
    except OSError as exc:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise UnwritableError(f"{path}: cannot be written: {exc.strerror}; the old content stays") from exc


class StateStore:
    """One namespace's statefile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lock_path = path.with_name(path.name + ".lock")

    @classmethod
    def of(cls, namespace: str) -> StateStore:
        """Return the store of ``namespace`` in the configured folder."""
        if _NAMESPACE.fullmatch(namespace) is None:
            raise ConfigError(
                f"--namespace: {namespace!r} must be 1 to 63 lower-case letters, digits or dashes, "
                "beginning and ending with a letter or digit"
            )
        return cls(state_dir() / f"{namespace}.json")

    def read(self) -> StateFile | None:
        """Return the file's content, or None when there is none."""
        self.check_folder()
        try:
            content = read_own(self.path)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise ConfigError(
                f"{self.path}: cannot be read: {exc.strerror}; check its owner and mode"
            ) from exc
        try:
            data = json.loads(content.decode("utf-8"))
        except (ValueError, RecursionError) as exc:
            raise ConfigError(
                f"{self.path}: not JSON ({exc}); run `penstock down --now`, or delete the file when nothing runs"
            ) from exc
        return from_json(data, source=str(self.path))

    def check_folder(self) -> None:
        """Refuse a state folder that another user owns or may write in; one that is not there is fine."""
        with contextlib.suppress(FileNotFoundError):
            _check_owner(self.path.parent, self.path.parent.stat())

    def update(self, change: Callable[[StateFile], tuple[StateFile, _T]]) -> _T:
        """Apply ``change`` to the current file under the lock, write the result if it differs, return the rest.

        Raises NotFoundError without a file, UnwritableError where the result cannot be written, ConflictError where
        another process held the lock for too long.
        """
        with self.locked():
            state = self.read()
            if state is None:
                raise NotFoundError(f"{self.path}: not there; the graph is not running (`penstock up FILE`)")
            changed, answer = change(state)
            if changed != state:
                self._replace(changed)
            return answer

    def write(self, state: StateFile) -> None:
        """Replace the file atomically, under the lock."""
        with self.locked():
            self._replace(state)

    def claim(self, state: StateFile) -> None:
        """Write the file as its new owner, over a stale one at most."""
        with self.locked():
            self.refuse_running()
            shutil.rmtree(self.discovery_folder, ignore_errors=True)
            self._replace(state)

    def read_quietly(self) -> StateFile | None:
        """Return the file's content, or None when there is none or it cannot be read."""
        try:
            return self.read()
        except ConfigError:
            return None

    def running(self) -> StateFile | None:
        """Return the file's content while its arbiter runs, else None.

        A file that cannot be read is read again for a moment: an arbiter that runs writes it again.
        """
        deadline_s = time.monotonic() + REPAIR_S
        while True:
            try:
                state = self.read()
            except ConfigError:
                if time.monotonic() > deadline_s:
                    return None
                time.sleep(_REPAIR_POLL_S)
            else:
                return state if state is not None and arbiter_is_alive(state) else None

    def unrecorded_arbiters(self) -> list[ProcessId]:
        """Return the arbiters that run for a file which is there and cannot be read."""
        try:
            self.read()
        except ConfigError:
            return arbiters_of(str(self.path))
        return []

    def refuse_running(self) -> None:
        """Refuse to continue over a graph that runs."""
        self.check_folder()
        state = self.running()
        for unrecorded in self.unrecorded_arbiters() if state is None else ():
            raise ConfigError(
                f"{self.path}: cannot be read, and its arbiter (pid {unrecorded.pid}) runs; "
                f"stop it with `penstock down --namespace {self.path.stem}`, or choose another --namespace"
            )
        if state is not None:
            arbiter = state.arbiter
            raise ConfigError(
                f"namespace {arbiter.namespace!r} is already running (arbiter pid {arbiter.pid}, {arbiter.router_url}); "
                f"stop it with `penstock down --namespace {arbiter.namespace}`, or choose another --namespace"
            )

    @property
    def discovery_folder(self) -> Path:
        """Return where the processes of some runtimes find each other."""
        return self.path.with_suffix(DISCOVERY_SUFFIX)

    def remove(self) -> None:
        """Delete the file, its lock, and what the runtime left next to it; does nothing if they do not exist."""
        shutil.rmtree(self.discovery_folder, ignore_errors=True)
        for suffix in (KV_EVENTS_SUFFIX, KV_REPLAY_SUFFIX):
            for socket in self.path.parent.glob(f"{self.path.stem}.[0-9]*{suffix}"):
                socket.unlink(missing_ok=True)
        with contextlib.suppress(ConfigError), self.locked():
            self.path.unlink(missing_ok=True)
            self.lock_path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def locked(self, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
        """Hold the exclusive lock, waiting at most ``timeout_s`` real seconds."""
        make_folder(self.path.parent)
        deadline = time.monotonic() + timeout_s
        while True:
            with self._open_lock() as file:
                _check_owner(self.lock_path, os.fstat(file.fileno()))
                if self._takes(file):
                    yield
                    return
            if time.monotonic() > deadline:
                raise ConflictError(
                    f"{self.lock_path}: held by another process for more than {timeout_s:g} s; try again"
                )
            time.sleep(0.002)

    def _open_lock(self) -> BinaryIO:
        try:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            return open(os.open(self.lock_path, flags, 0o600), "r+b", buffering=0)  # noqa: PTH123 - a descriptor
        except OSError as exc:
            raise ConfigError(
                f"{self.lock_path}: cannot be made: {exc.strerror}; set {STATE_DIR_VARIABLE} to a writable folder"
            ) from exc

    def _takes(self, file: BinaryIO) -> bool:
        """Return whether the lock is free, and the file still the one at the path: `remove` deletes it under the lock."""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return os.path.samestat(self.lock_path.stat(), os.fstat(file.fileno()))
        except (BlockingIOError, FileNotFoundError):
            return False

    def _replace(self, state: StateFile) -> None:
        replace_file(self.path, json.dumps(to_json(state), indent=2) + "\n")


def keep_text(text: str, kept: Path) -> Path:
    """Write a manifest for this user alone, and return where."""
    make_folder(kept.parent)
    try:
        with os.fdopen(os.open(kept, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, FILE_MODE), "w") as stream:
            stream.write(text)
    except OSError as exc:
        raise ConfigError(unwritable(str(kept), exc)) from exc
    return kept
