"""Waits for the arbiter's end and becomes its successor when that was not orderly.

Run as a plain script, ``python -I -S watchdog_child.py PROGRAM ARG…``, by `arbiter`. Its stdin is a pipe whose other
end only the arbiter holds: a word on it means that the arbiter ends by itself, its closing without a word that
the arbiter was killed. Imports nothing of Penstock, so that it is small and starts at once.
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
