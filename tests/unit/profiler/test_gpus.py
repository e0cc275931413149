"""GPUs are counted by NVIDIA's library or program; a machine without either says that it cannot tell."""

import sys
import types

import pytest

from penstock.profiler import gpus


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine with neither; returns the folder of its programs."""
    monkeypatch.setitem(sys.modules, "pynvml", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def script(folder, text):
    """Put an nvidia-smi there."""
    path = folder / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_nothing_is_found_on_a_bare_machine(bare):
    """Unknown, not zero."""
    assert gpus.detect() is None


@pytest.mark.parametrize(
    ("text", "found"),
    [("echo 'GPU 0: H100'; echo 'GPU 1: H100'", 2), ("echo 'No devices were found'", None), ("exit 9", None)],
)
def test_the_program_lists_them(bare, text, found):
    """A line each; a failure is unknown."""
    script(bare, text)

    assert gpus.detect() == found


@pytest.mark.parametrize("fails", [False, True])
def test_the_library_is_asked_first(bare, monkeypatch, fails):
    """And the program where it fails."""
    library = types.ModuleType("pynvml")
    library.NVMLError = type("NVMLError", (Exception,), {})

    def start():
        if fails:
            raise library.NVMLError

    library.nvmlInit, library.nvmlShutdown = start, lambda: None
    library.nvmlDeviceGetCount = lambda: 4
    monkeypatch.setitem(sys.modules, "pynvml", library)
    script(bare, "echo 'GPU 0: H100'")

    assert gpus.detect() == (1 if fails else 4)
