"""Uses a listening socket that the starting process passed to this one, like systemd's socket activation.

Variable ``LISTEN_FDS`` has the number of sockets, from file descriptor 3 on, and ``LISTEN_PID`` the process that they
are for. The starting process keeps the socket open while other processes are restarted, so that connections wait for
the next process. Source: https://www.freedesktop.org/software/systemd/man/latest/sd_listen_fds.html.
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


def socket_from_environment(environment: Mapping[str, str], port: int) -> socket.socket | None:
    """Return the listening socket that was passed to this process for ``port``; None if none was passed.

    Args:
        environment: Environment variables.
        port: Port that the socket must listen on; 0 accepts any.

    Raises:
        ConfigError: Several sockets were passed, or one that does not listen on that port.
    """
    if environment.get(PID_VARIABLE) != str(os.getpid()):
        return None  # the variables are for the process that started this one
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
