"""Opens files that a user names, without blocking forever on a FIFO that has no writer."""

from __future__ import annotations

import errno
import io
import os
import select
import stat
import time
from pathlib import Path
from typing import BinaryIO, Final

PATIENCE_S: Final = 10.0
"""Wall-clock seconds without data after which reading a pipe times out. Chosen: a command that prints a file has
started by then."""
_POLL_S: Final = 0.05
_CHUNK_BYTES: Final = 1 << 16


def open_file(path: Path, *, patience_s: float = PATIENCE_S) -> BinaryIO:
    """Open a file for reading; a pipe, such as a shell's ``<(command)``, is read completely into memory first.

    Args:
        path: Path of the file.
        patience_s: Wall-clock seconds without data after which reading a pipe times out.

    Raises:
        OSError: The file cannot be opened, is a folder, or is a pipe that delivers no data for ``patience_s``.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISDIR(mode):
        os.close(descriptor)
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    if stat.S_ISFIFO(mode):
        try:
            return io.BytesIO(_drained(descriptor, patience_s))
        finally:
            os.close(descriptor)
    os.set_blocking(descriptor, True)
    return open(descriptor, "rb")  # noqa: PTH123 - a descriptor


def read_bytes(path: Path) -> bytes:
    """Return the content of a file; raises as `open_file` does."""
    with open_file(path) as file:
        return file.read()


def _drained(descriptor: int, patience_s: float) -> bytes:
    found = bytearray()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    deadline_s = time.monotonic() + patience_s
    while True:
        events = poll.poll(0)
        # Before a writer has opened the FIFO there is no event, and a read would return end of file.
        data = os.read(descriptor, _CHUNK_BYTES) if events else None
        if data:
            found += data
            deadline_s = time.monotonic() + patience_s
        elif data == b"":
            return bytes(found)
        elif time.monotonic() > deadline_s:
            raise TimeoutError(errno.ETIMEDOUT, f"a pipe from which nothing came for {patience_s:g} s")
        else:
            poll.poll(_POLL_S * 1000)
