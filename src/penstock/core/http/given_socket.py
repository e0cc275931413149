"""A listening socket that a process was given by who started it, in the way of systemd's socket activation.

Variable ``LISTEN_FDS`` says how many sockets there are, from file descriptor 3 on, and ``LISTEN_PID`` for which process.
The giver keeps the socket while processes come and go, so that connections wait for the next one.
Source: https://www.freedesktop.org/software/systemd/man/latest/sd_listen_fds.html.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Final

from penstock.core.errors import ConfigError

FIRST_DESCRIPTOR: Final = 3
COUNT_VARIABLE: Final = "LISTEN_FDS"
PID_VARIABLE: Final = "LISTEN_PID"


def given_socket(environment: Mapping[str, str], port: int) -> socket.socket | None:
    """Return the socket that this process was given for ``port``, or None if it was given none.

    Raises:
        ConfigError: it was given several, or one that does not listen on that port.
    """
    if environment.get(PID_VARIABLE) != str(os.getpid()):
        return None  # meant for the process that started this one
    count = environment.get(COUNT_VARIABLE, "0")
    if count == "0":
        return None
    if count != "1":
        raise ConfigError(f"{COUNT_VARIABLE}: {count} sockets were given, and 1 is taken; give one")
    try:
        given = socket.socket(fileno=FIRST_DESCRIPTOR)
    except OSError as exc:
        raise ConfigError(
            f"{COUNT_VARIABLE}: file descriptor {FIRST_DESCRIPTOR} is not a socket ({exc}); unset the variable"
        ) from exc
    given.set_inheritable(False)
    name = given.getsockname()
    is_listening = given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    if not is_listening or not isinstance(name, tuple) or (port != 0 and name[1] != port):
        given.close()
        raise ConfigError(
            f"{COUNT_VARIABLE}: the socket that was given does not listen on port {port}; give one that does, or choose its "
            "--port"
        )
    return given
