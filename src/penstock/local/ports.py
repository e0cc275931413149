"""TCP ports of loopback: is one free, and choosing one for a worker."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Collection

from penstock.core.errors import ClusterError

FIRST_PORT, LAST_PORT = 21000, 29999
"""Chosen: below Linux's ephemeral range (32768 and up), so that no outgoing connection takes a port
between its choice here and the worker's bind."""

_STRIDE = 61
"""Chosen: arbiters with neighbouring pids begin their search apart."""


def is_free(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a server could listen on ``host:port`` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError:
            return False
        return True


def choose_port(taken: Collection[int]) -> int:
    """Return a free port of the worker range that is not among ``taken``."""
    size = LAST_PORT - FIRST_PORT + 1
    start = os.getpid() * _STRIDE % size
    for offset in range(size):
        port = FIRST_PORT + (start + offset) % size
        if port not in taken and is_free(port):
            return port
    raise ClusterError(f"no free port in {FIRST_PORT}-{LAST_PORT} on 127.0.0.1; stop what holds them")


def unused_port() -> int:
    """Return a port of the worker range that is free now, at random; for a server that is started at once."""
    ports = range(FIRST_PORT, LAST_PORT + 1)
    return next(filter(is_free, random.sample(ports, len(ports))))
