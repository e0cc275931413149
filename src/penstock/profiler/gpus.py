"""How many GPUs this machine has: by NVIDIA's library where it is installed, else by ``nvidia-smi``."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from typing import Any

_TIMEOUT_S = 20.0
"""Real seconds. Chosen: a driver that wakes every GPU of a large node takes ten."""


def detect() -> int | None:
    """Return the number of GPUs; None: neither the library nor the program can tell."""
    return _by_library() or _by_program()


def _by_library() -> int | None:
    try:
        library: Any = importlib.import_module("pynvml")
    except ImportError:
        return None
    try:
        library.nvmlInit()
        try:
            return int(library.nvmlDeviceGetCount())
        finally:
            library.nvmlShutdown()
    except library.NVMLError:
        return None


def _by_program() -> int | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        listed = subprocess.run(  # noqa: S603 - found on PATH, without a shell
            [program, "--list-gpus"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines()) or None
