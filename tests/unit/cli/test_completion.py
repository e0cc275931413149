"""Shells complete commands and options with the scripts that `penstock completion` prints."""

import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from penstock.cli.main import cli


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_its_script(shell):
    """It asks the command itself, through click's variable."""
    result = CliRunner().invoke(cli, ["completion", shell])
    assert result.exit_code == 0
    assert f"_PENSTOCK_COMPLETE={shell}_complete" in result.stdout
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=result.stdout, text=True, check=True)


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
