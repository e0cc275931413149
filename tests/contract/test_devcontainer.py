"""The development container sets itself up with what the repository has."""

import re
from pathlib import Path

import click
import orjson

from penstock.cli.doctor_install import PORTS, SHM_MIB
from penstock.cli.main import cli

ROOT = Path(__file__).parents[2]
CONTAINER = orjson.loads((ROOT / ".devcontainer" / "devcontainer.json").read_bytes())


def test_its_commands_are_targets_and_commands_that_exist():
    """`make TARGET` is in the Makefile, `penstock VERB` on the command line."""
    makefile = (ROOT / "Makefile").read_text().replace("$(VENV)", ".venv").replace("$(BIN)", ".venv/bin")
    targets = set(re.findall(r"^([\w./-]+):", makefile, re.MULTILINE))
    called = [CONTAINER[key] for key in CONTAINER if key.endswith("Command")]

    made = [target for each in called for target in re.findall(r"make ([\w./-]+)", each)]
    assert made
    assert set(made) <= targets
    assert {verb for each in called for verb in re.findall(r"penstock (\w+)", each)} <= set(
        cli.list_commands(click.Context(cli))
    )


def test_it_forwards_the_default_ports_and_has_the_shared_memory_that_is_checked():
    """What `penstock doctor --install` says there is no warning."""
    assert set(CONTAINER["forwardPorts"]) == set(PORTS)
    assert CONTAINER["portsAttributes"] == {str(port): {"label": label} for port, label in PORTS.items()}
    size = re.fullmatch(r"--shm-size=(\d+)g", CONTAINER["runArgs"][0])
    assert int(size[1]) * 1024 >= SHM_MIB
