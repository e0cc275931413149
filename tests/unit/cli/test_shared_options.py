"""Options that several commands take mean and refuse the same everywhere."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock_api import AdmissionConfig
from penstock_cli.main import cli
from penstock_core.errors import ConfigError

SAMPLE = str(Path(__file__).parents[3] / "manifests" / "samples" / "disaggregated.yaml")

COMMANDS = {
    "up": ["up", SAMPLE],
    "render": ["render", SAMPLE],
    "demo": ["demo", "--output-dir", "nowhere"],
    "load": ["load", "--trace", "mooncake"],
    "router": ["router", "serve"],
    "planner": ["planner", "run"],
    "engine": ["engine", "serve", "m"],
}


@pytest.mark.parametrize("scale", ["0", "-1", "nan", "inf"])
@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_no_command_takes_a_time_scale_that_is_none(command, scale):
    """A graph at NaN would start and every duration of it would be NaN."""
    result = CliRunner().invoke(cli, [*command, "--speed", scale])
    assert isinstance(result.exception, ConfigError)
    assert "must be a finite number above 0" in str(result.exception)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_the_time_scale_alike(name):
    """The help gives the unit."""
    verb = {"router": ["serve"], "planner": ["run"], "engine": ["serve"]}.get(name, [])
    text = " ".join(CliRunner().invoke(cli, [name, *verb, "--help"]).output.split())
    assert "Time scale: simulated seconds per real second" in text


@pytest.mark.parametrize(("command", "least"), [(["up", SAMPLE], 1), (["router", "serve"], 0)])
def test_a_port_is_bounded(command, least):
    """Only where a free port may be taken is 0 a port."""
    result = CliRunner().invoke(cli, [*command, "--port", "65536"])
    assert result.exit_code == 2
    assert f"{least}<=x<=65535" in result.output


@pytest.mark.parametrize("name", AdmissionConfig.model_fields)
def test_the_router_and_the_simulator_take_the_same_admission_flags(name):
    """Of each key of the manifest, with the manifest's own words and default."""
    # Simulated clients come once.
    commands = [["router", "serve"], *([] if name == "retry_after_seconds" else [["simulate"]])]
    field = AdmissionConfig.model_fields[name]
    flag = "--admission-control" if name == "mode" else f"--{name.replace('_', '-')}"
    for each in commands:
        text = " ".join(CliRunner().invoke(cli, [*each, "--help"], terminal_width=500).output.split())
        assert flag in text
        assert field.description in text
