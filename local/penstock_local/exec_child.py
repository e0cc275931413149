"""Becomes a child process: bound to its parent's life, writing to its own log file.

Run as a plain script, ``python -I -S exec_child.py LOG PARENT_PID PROGRAM ARG…``, by circus. It asks the
kernel for SIGTERM on the death of the arbiter (so that even `kill -9` of the arbiter leaves workers that
finish their streams and end), points stdout and stderr at LOG, and replaces itself with PROGRAM.

Doing this after the fork, in a fresh interpreter, uses circus' public interface only, costs about 15 ms,
and keeps the log out of the arbiter's event loop: a stalled arbiter never blocks a worker's write.
Imports nothing of Penstock.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""<linux/prctl.h>"""

CANNOT_EXECUTE = 127
"""The shell's own exit code for a command that cannot be started."""


def become(log: str, parent: int, argv: list[str]) -> int:
    """Replace this process with ``argv``; returns an exit code only when that is impossible."""
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if output > 2:
        os.close(output)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            return CANNOT_EXECUTE  # the arbiter died before the request above; nobody wants this process
    try:
        os.execvp(argv[0], argv)  # noqa: S606 - the point of this script
    except OSError as exc:
        os.write(2, f"cannot start {argv[0]!r}: {exc.strerror}; check that it is installed\n".encode())
    return CANNOT_EXECUTE


if __name__ == "__main__":
    sys.exit(become(sys.argv[1], int(sys.argv[2]), sys.argv[3:]))
