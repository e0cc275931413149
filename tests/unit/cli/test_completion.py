"""Shells complete commands and options with the scripts that `penstock completion` prints."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from click.testing import CliRunner

from penstock.api.manifests import parse_manifests
from penstock.cli.main import cli
from penstock.cli.samples import sample_files, samples


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


def test_every_sample_is_listed_with_what_it_is():
    """The list names each sample and says in a line what it shows."""
    lines = CliRunner().invoke(samples).output.splitlines()
    assert list(sample_files()) == [line.split()[0] for line in lines]
    assert all(len(line.split()) > 3 for line in lines)


def test_a_sample_is_printed_as_it_stands_and_is_valid():
    """What is printed can be redirected to a file and started."""
    for name, path in sample_files().items():
        printed = CliRunner().invoke(samples, [name])
        assert path.read_text(encoding="utf-8") == printed.output
        assert parse_manifests(printed.output, name)[1] == []


def test_an_unknown_sample_names_the_known_ones():
    """A typo is a usage error that lists the names."""
    answer = CliRunner().invoke(samples, ["disagregated"])
    assert answer.exit_code == 2
    assert "disaggregated" in answer.output
