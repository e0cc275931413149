"""Becomes the arbiter's successor unless that ends orderly: ``python -I -S watchdog_child.py PROGRAM ARG…``.

Its stdin is a pipe whose other end only the arbiter holds: a word on it means that the arbiter ends by itself, its closing
without one that the arbiter was killed. Imports nothing of Penstock, so that it is small and starts at once.
"""

import os
import sys


def succeed(argv: list[str]) -> int:
    """Wait; return 0 after an orderly end, else replace this process with ``argv``."""
    if not sys.stdin.buffer.read():
        os.execv(argv[0], argv)  # noqa: S606 - the point of this script
    return 0


if __name__ == "__main__":
    sys.exit(succeed(sys.argv[1:]))
