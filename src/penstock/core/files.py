"""Opens files that a user names, without waiting for ever: one may be a FIFO without a writer."""

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
"""Real seconds without a byte from a pipe. Chosen: a command that prints a file has begun by then."""
_POLL_S: Final = 0.05
_CHUNK_BYTES: Final = 1 << 16


def open_file(path: Path, *, patience_s: float = PATIENCE_S) -> BinaryIO:
    """Return a file to read; of a pipe, such as a shell's ``<(command)``, all that comes.

    Raises:
        OSError: it cannot be opened, is a folder, or a pipe from which nothing comes for ``patience_s``.
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
    """Return the content of a file; raises as `open_file`."""
    with open_file(path) as file:
        return file.read()


def _drained(descriptor: int, patience_s: float) -> bytes:
    found = bytearray()
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    deadline_s = time.monotonic() + patience_s
    while True:
        events = poll.poll(0)
        # Before the first writer has come a FIFO has no event, and its end is read at once.
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
