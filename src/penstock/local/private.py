"""The local state belongs to one user: what another user owns or may write is refused.

A statefile holds commands that the arbiter runs and variables that may be secrets; circus' sockets run any command.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path
from typing import Final

from penstock.core.errors import ConfigError, unwritable
from penstock.core.local_state import STATE_DIR_VARIABLE

SOCKET_PATH_BYTES: Final = 107
"""Longest path of a Unix socket on Linux: ``sun_path`` less its end (unix(7))."""

_OWNER_ONLY: Final = 0o700
FILE_MODE: Final = 0o600
"""Of files that belong to this user alone."""
_WRITE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH
_CONTROL, _EVENTS = "control", "events"
_SCHEME: Final = "ipc://"


def make_folder(path: Path) -> None:
    """Make a folder, and parents that are missing, for this user alone; check one that exists."""
    try:
        for folder in reversed([path, *path.parents]):
            if not folder.exists():
                folder.mkdir(mode=_OWNER_ONLY, exist_ok=True)
        check(path, path.stat())
    except OSError as exc:
        raise ConfigError(
            f"{unwritable(str(path), exc)}: set {STATE_DIR_VARIABLE}, or --log-dir for logs"
        ) from exc


def check(path: Path, status: os.stat_result) -> None:
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


def read(path: Path) -> bytes:
    """Return the content of a regular file that this user owns alone; follows no link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:  # noqa: PTH123 - a descriptor
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ConfigError(f"{path}: not a regular file; delete it")
        check(path, status)
        return file.read()


def make_endpoints(statefile: Path, pid: int) -> tuple[str, str]:
    """Make a folder that only this user may enter, and return circus' control and event endpoints in it.

    It lies beside the statefile, or in the folder for temporary files where that path would be too long.
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
