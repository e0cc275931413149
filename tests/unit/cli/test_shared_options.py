"""Options that several commands take mean and refuse the same everywhere."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from penstock.cli import option
from penstock.cli.main import cli
from penstock.core.errors import ConfigError

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


@pytest.mark.parametrize(("command", "least"), [(["up", SAMPLE], 1), (["router", "serve"], 0)])
def test_a_port_is_bounded(command, least):
    """Only where a free port may be taken is 0 a port."""
    result = CliRunner().invoke(cli, [*command, "--port", "65536"])
    assert result.exit_code == 2
    assert f"{least}<=x<=65535" in result.output


@pytest.mark.parametrize(
    ("command", "flag"), [("load", "--api-key"), ("load", "--admin-key"), ("profile", "--api-key")]
)
def test_no_key_is_an_argument(command, flag):
    """Arguments of processes are everybody's to read: a key comes from a file or the environment."""
    result = CliRunner().invoke(cli, [command, flag, "secret"])
    assert result.exit_code == 2
    assert f"{flag}-file" in result.output


@click.command()
@option.secret("api-key", "PENSTOCK_API_KEY", "Key.")
def shown(api_key):
    """Print the key that a command gets."""
    click.echo(repr(api_key))


@pytest.mark.parametrize(
    ("text", "environment", "expected"),
    [
        (None, {}, None),
        (None, {"PENSTOCK_API_KEY": ""}, None),
        (None, {"PENSTOCK_API_KEY": "of-env"}, "of-env"),
        ("of-file\n", {"PENSTOCK_API_KEY": "of-env"}, "of-file"),
    ],
)
def test_a_file_with_a_key_goes_before_the_variable(tmp_path, text, environment, expected):
    """An empty variable is none."""
    (tmp_path / "key").write_text(text or "")
    given = [] if text is None else ["--api-key-file", str(tmp_path / "key")]
    result = CliRunner().invoke(shown, given, env={"PENSTOCK_API_KEY": None, **environment})
    assert result.output == f"{expected!r}\n"


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "0 words"), (b"a b", "2 words"), (b"\xff", "cannot be read")]
)
def test_a_file_without_one_key_is_refused(tmp_path, content, said):
    """The message names flag and file, and shows nothing of it."""
    (tmp_path / "key").write_bytes(content)
    result = CliRunner().invoke(shown, ["--api-key-file", str(tmp_path / "key")])
    assert isinstance(result.exception, ConfigError)
    assert f"--api-key-file {tmp_path / 'key'}: {said}" in str(result.exception)
