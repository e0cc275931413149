"""Options generated from a dataclass: spelling, type, default, bounds and conversion come from its fields."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from penstock.cli import fields, option
from penstock.cli.main import cli
from penstock.core.errors import ConfigError
from penstock.core.flags import check_bounds, flag, time_scale


class Order(StrEnum):
    """A closed set."""

    FIFO = "fifo"
    LIFO = "lifo"


@dataclass(frozen=True)
class Part:
    """Fields within another dataclass."""

    share: float = flag("Share.", default=1.0, gt=0, le=1)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """One field of each kind."""

    name: str = flag("Name.")
    tokens: int | None = flag("Tokens.", ge=1, unset="all")
    order: Order = flag("Order.", default=Order.FIFO)
    rates: tuple[float, ...] = flag("Rates, requests/s.", default=(), is_separated=True, gt=0)
    at_s: tuple[float, ...] = flag("Seconds.", name="--at", default=(), convert=lambda at: at / 2)
    pair: tuple[str, ...] = flag("Pair.", default=(), convert=lambda text: text.index("="), form="KEY=VALUE")
    with_gaps: bool = flag("No gaps.", name="--no-gaps", default=True)
    part: Part
    speed: float = time_scale()
    key: str | None = flag("File of the key.", default=None, key_variable="SOME_KEY")
    given: str


@click.command()
@fields.options(Settings)
def shown(**options):
    """Print what a command gets."""
    click.echo(fields.take(Settings, options, given="by the command"))
    assert not options


def run(*arguments):
    """Return the result of the command."""
    given = ["--name", "n", *arguments]
    return CliRunner().invoke(shown, given, env={"SOME_KEY": "secret"}, catch_exceptions=False)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ((), "tokens=None, order=<Order.FIFO: 'fifo'>, rates=(), at_s=(), pair=(), with_gaps=True"),
        (("--order", "lifo", "--tokens", "3"), "tokens=3, order=<Order.LIFO: 'lifo'>"),
        (("--rates", "1,2.5", "--at", "4", "--at", "6"), "rates=(1.0, 2.5), at_s=(2.0, 3.0)"),
        (("--no-gaps", "--share", "0.5"), "with_gaps=False, part=Part(share=0.5), speed=1.0"),
    ],
)
def test_values_reach_the_fields(arguments, expected):
    """A key is filled from its variable and not shown."""
    output = run(*arguments).output
    assert expected in output
    assert "given='by the command'" in output
    assert "secret" not in output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--tokens", "0"), "0 is not in the range x>=1"),
        (("--share", "2"), "2.0 is not in the range 0<x<=1"),
        (("--rates", "1,x"), "'1,x': must be numbers separated by commas"),
        (("--rates", "nan"), "nan: must be finite"),
        (("--order", "any"), "'any' is not one of 'fifo', 'lifo'"),
    ],
)
def test_values_out_of_bounds_are_usage_errors(arguments, said):
    """The message names flag, value and bound."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert arguments[0] in result.output
    assert said in result.output


def test_text_that_cannot_be_read_names_its_form():
    """The remedy is the form."""
    with pytest.raises(ConfigError, match="--pair x: must be KEY=VALUE"):
        CliRunner().invoke(shown, ["--name", "n", "--pair", "x"], catch_exceptions=False)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (Part(0.0), "--share: 0.0 must be finite and above 0 and at most 1"),
        (Part(float("inf")), "--share: inf must be finite"),
        (Settings(name="n", tokens=0, part=Part(), given=""), "--tokens: 0 must be at least 1"),
        (
            Settings(name="n", rates=(1.0, 0.0), part=Part(), given=""),
            "--rates: 0.0 must be finite and above 0",
        ),
    ],
)
def test_bounds_hold_for_callers_in_python(settings, said):
    """Without a command line, and for each of several values, too."""
    with pytest.raises(ConfigError, match=said):
        check_bounds(settings)


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
def keyed(api_key):
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
    result = CliRunner().invoke(keyed, given, env={"PENSTOCK_API_KEY": None, **environment})
    assert result.output == f"{expected!r}\n"


@pytest.mark.parametrize(
    ("content", "said"), [(b"", "0 words"), (b"a b", "2 words"), (b"\xff", "cannot be read")]
)
def test_a_file_without_one_key_is_refused(tmp_path, content, said):
    """The message names flag and file, and shows nothing of it."""
    (tmp_path / "key").write_bytes(content)
    result = CliRunner().invoke(keyed, ["--api-key-file", str(tmp_path / "key")])
    assert isinstance(result.exception, ConfigError)
    assert f"--api-key-file {tmp_path / 'key'}: {said}" in str(result.exception)
