"""GPUs are counted by NVIDIA's program; a machine without it says that it cannot tell."""

import pytest

from penstock.profiler import gpus


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without it; returns the folder of its programs."""
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
