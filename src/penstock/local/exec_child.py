"""Becomes a child process that writes to its own log: ``python -I -S exec_child.py LOG SOCKET PROGRAM ARG…``, run by circus.

SOCKET is the file descriptor of a listening socket that the program is given as systemd gives it, or ``-`` for none.

In a fresh interpreter after the fork it uses circus' public interface only, costs about 15 ms, and keeps the log out of
the arbiter's event loop. Imports nothing of Penstock.
"""

import os
import sys

CANNOT_EXECUTE = 127
"""The shell's own exit code for a command that cannot be started."""


_FIRST_DESCRIPTOR = 3
"""Where the program looks for its socket; see ``penstock.core.http.inherited_socket``."""


def become(log: str, held: str, argv: list[str]) -> int:
    """Replace this process with ``argv``; returns an exit code only when that is impossible."""
    output = _open(log)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if output > 2:
        os.close(output)
    if held != "-":
        os.dup2(int(held), _FIRST_DESCRIPTOR)
        os.set_inheritable(_FIRST_DESCRIPTOR, True)  # dup2 of a descriptor to itself changes nothing
        os.closerange(_FIRST_DESCRIPTOR + 1, os.sysconf("SC_OPEN_MAX"))
        os.environ.update(LISTEN_FDS="1", LISTEN_PID=str(os.getpid()))
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
    sys.exit(become(sys.argv[1], sys.argv[2], sys.argv[3:]))
