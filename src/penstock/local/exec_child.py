"""Becomes a child process that writes to its own log: ``python -I -S exec_child.py LOG PROGRAM ARG…``, run by circus.

In a fresh interpreter after the fork it uses circus' public interface only, costs about 15 ms, and keeps the log out of
the arbiter's event loop. Imports nothing of Penstock.
"""

import os
import sys

CANNOT_EXECUTE = 127
"""The shell's own exit code for a command that cannot be started."""


def become(log: str, argv: list[str]) -> int:
    """Replace this process with ``argv``; returns an exit code only when that is impossible."""
    output = _open(log)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if output > 2:
        os.close(output)
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - the point of this script
    except OSError as exc:
        os.write(2, f"cannot start {argv[0]!r}: {exc.strerror}; check that it is installed\n".encode())
    return CANNOT_EXECUTE


def _open(log: str) -> int:
    try:
        return os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


if __name__ == "__main__":
    sys.exit(become(sys.argv[1], sys.argv[2:]))
