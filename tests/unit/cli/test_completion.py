"""Shells complete commands and options with the scripts that `penstock completion` prints."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("penstock pl", "planner"),
        ("penstock simulate --queue-o", "--queue-order"),
        ("penstock --lo", "--log-json"),
    ],
)
def test_commands_and_options_are_completed(words, expected):
    """As bash asks for them."""
    environment = {
        **os.environ,
        "_PENSTOCK_COMPLETE": "bash_complete",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }
    code = "from penstock.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert f"plain,{expected}" in done.stdout.split()
