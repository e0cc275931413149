"""Plugin: a test fails if a process that it started or a port that it listens on outlives it.

What fixtures of a module or of the session started may stay. A process is known by a variable in its environment, so it
is found whoever its parent is now; one with a blank environment is found while it is a descendant of the tests' process.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from patience import within

_VARIABLE = "PENSTOCK_TESTS_OF"
_BIND = "socket.bind"
_EVENTS = frozenset({"subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec", _BIND})
_GONE = (FileNotFoundError, ProcessLookupError, PermissionError)
_REAL = Path(__file__).parents[1] / "real"
_GRACE_S = 10.0
"""Chosen: a process that was killed takes a moment to end, and a closed socket to leave the kernel's table."""

_seen: set[str] = set()
"""What happened since the last look; a look costs too much for the thousands of tests that start nothing."""
_known: set[object] = set()
"""What fixtures of a wider scope than a function left, and failing tests, which are reported once."""


def _note(event: str, _arguments: tuple[object, ...]) -> None:
    if event in _EVENTS:
        _seen.add(event)


def pytest_configure() -> None:
    """Mark the processes that tests start from now on, and notice that there are any."""
    os.environ[_VARIABLE] = str(os.getpid())
    sys.addaudithook(_note)


_HELPERS = (
    "from multiprocessing.resource_tracker import main",
    "from multiprocessing.forkserver import main",
)
"""Processes that `multiprocessing` starts once for a process, and that end with it."""


def _processes() -> dict[object, str]:
    """Return the running processes of these tests: pid and start, and what each is."""
    mark = f"{_VARIABLE}={os.getpid()}".encode()
    parents, marked, found = {}, set(), {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or (pid := int(folder.name)) == os.getpid():
            continue
        try:
            # The name in parentheses may hold spaces: fields are counted behind it.
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            if fields[0] in "ZX":
                continue
            parents[pid], started = int(fields[1]), fields[19]
            words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if parents[pid] == os.getpid() and any(each in words for each in _HELPERS):
                continue
            found[pid] = ((pid, started), f"process {pid}: {words[:300]}")
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                marked.add(pid)
        except _GONE:
            continue
    return {
        key: words
        for pid, (key, words) in found.items()
        if (pid in marked or os.getpid() in _ancestors(pid, parents)) and not _is_of_a_fixture(pid, parents)
    }


def _ancestors(pid: int, parents: dict[int, int]) -> Iterator[int]:
    while (pid := parents.get(pid, 0)) > 1:
        yield pid


def _is_of_a_fixture(pid: int, parents: dict[int, int]) -> bool:
    """Return whether a process that may stay has started this one, as an arbiter starts a killed worker again."""
    kept = {key[0] for key in _known if isinstance(key, tuple)}
    return any(each in kept for each in _ancestors(pid, parents))


def _listening() -> dict[object, str]:
    """Return the sockets on which the tests' own process listens, by inode."""
    found: dict[object, str] = {}
    for each in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            name = str(each.readlink())
            if name.startswith("socket:"):
                with socket.socket(fileno=os.dup(int(each.name))) as copy:
                    if copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                        found[name] = f"{copy.getsockname()} is listened on"
    return found


def _all(events: set[str]) -> dict[object, str]:
    """Return what is there of the kinds that the events made."""
    return {
        **(_processes() if events - {_BIND} else {}),
        **(_listening() if _BIND in events else {}),
    }


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[object]) -> Generator[None, object, object]:
    """Let what a fixture of a wider scope starts stay."""
    if fixturedef.scope == "function" or not sys.platform.startswith("linux"):
        return (yield)
    # Such fixtures are made before those of the test, of which nothing is there yet.
    _seen.clear()
    result = yield
    _known.update(_all(_seen))
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None, None, None]:
    """Look for leftovers once the test's own fixtures have ended; end them and fail."""
    yield
    if not _seen or not sys.platform.startswith("linux"):
        return
    if item.path.is_relative_to(
        _REAL
    ):  # fixtures of the session start engines there when a test first asks for one
        return
    events = set(_seen)
    _seen.clear()
    deadline_s = time.monotonic() + within(_GRACE_S)
    while left := {key: words for key, words in _all(events).items() if key not in _known}:
        if time.monotonic() > deadline_s:
            break
        time.sleep(0.02)
    for key in left:
        if isinstance(key, tuple):
            with contextlib.suppress(ProcessLookupError):
                os.kill(key[0], signal.SIGKILL)
        _known.add(key)
    if left:
        pytest.fail("the test left behind: " + "; ".join(map(str, left.values())), pytrace=False)
