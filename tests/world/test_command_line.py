"""The command line as a whole: help with units and defaults, and the planner's fifteen options."""

import re

import click
import pytest

from penstock.cli.main import cli

FIFTEEN = {
    "--namespace": "dynamo",
    "--environment": "local",
    "--served-model-name": "vllm",
    "--no-operation": "false",
    "--log-dir": "none",
    "--adjustment-interval": "30",
    "--metric-pulling-interval": "1",
    "--max-gpu-budget": "8",
    "--min-gpu-budget": "1",
    "--decode-kv-scale-up-threshold": "0.9",
    "--decode-kv-scale-down-threshold": "0.5",
    "--prefill-queue-scale-up-threshold": "0.5",
    "--prefill-queue-scale-down-threshold": "0.2",
    "--decode-engine-num-gpu": "1",
    "--prefill-engine-num-gpu": "1",
}
"""By the names of the planner's document, with its defaults."""

UNITS = re.compile(
    r"seconds?\b|milliseconds|[Tt]okens?\b|GPUs?\b|[Ff]raction|[Ss]hare|bytes|\bport\b|\bPort\b|TCP|[Rr]equests?\b"
    r"|blocks?\b|[Bb]andwidth|arrivals|[Ff]actor|[Ww]orkers|Runs|[Pp]rocesses|[Hh]ow many|Chooses|[Ss]eed|Of sampling|Prompts?"
)
ISSUED = {
    "up",
    "load",
    "status",
    "down",
    "demo",
    "report",
    "validate",
    "render",
    "import",
    "planner",
    "router",
    "engine",
}


def find(path):
    """Return a command and its context by the words after `penstock`."""
    command, context = cli, click.Context(cli, info_name="penstock")
    for word in path.split():
        command = command.get_command(context, word)
        context = click.Context(command, info_name=word, parent=context)
    return command, context


def options(command):
    """Return the options that the help shows, but --help."""
    found = [each for each in command.params if isinstance(each, click.Option)]
    return [each for each in found if each.name != "help" and not each.hidden]


def every_command():
    """Return all commands, as the words after `penstock`."""
    paths = []
    for name in cli.list_commands(click.Context(cli)):
        command, context = find(name)
        is_group = isinstance(command, click.Group)
        paths += [f"{name} {each}" for each in command.list_commands(context)] if is_group else [name]
    return paths


def test_every_command_is_listed():
    """`penstock --help` names each first word with what it does."""
    context = click.Context(cli, info_name="penstock")
    assert set(cli.list_commands(context)) >= ISSUED
    for name in cli.list_commands(context):
        assert re.search(rf"^  {name} +\S", cli.get_help(context), re.MULTILINE)


@pytest.mark.parametrize("path", every_command())
def test_every_option_says_what_it_is_its_unit_and_its_default(path):
    """A number has a unit; a value has a default, is required, or says what applies without it."""
    command, context = find(path)
    assert command.help
    for option in options(command):
        shown = " ".join(option.get_help_record(context)[1].split())
        assert option.help, option.name
        if isinstance(option.type, click.types.FloatParamType | click.types.IntParamType):
            assert UNITS.search(shown), f"{option.name}: no unit in {shown!r}"
            assert "default" in shown.lower() or option.required, f"{option.name}: no default in {shown!r}"


@pytest.mark.parametrize(("flag", "default"), FIFTEEN.items())
def test_the_planner_has_the_fifteen_options_with_the_documents_defaults(flag, default):
    """Each exists on `planner run` by the document's name; its help shows the document's default."""
    command, context = find("planner run")
    option = next(each for each in options(command) if flag in each.opts)
    assert f"[default: {default}]" in " ".join(option.get_help_record(context)[1].split())


def test_the_same_keys_hold_in_yaml(tmp_path, world):
    """Each of the fifteen names is read from the section `Planner` of a file."""
    keys = "".join(f"  {flag[2:]}: {value}\n" for flag, value in FIFTEEN.items() if value != "none")
    file = tmp_path / "planner.yaml"
    file.write_text("Planner:\n" + keys)
    done = world.run("planner", "run", "--config", file, "--dry-run")
    assert done.returncode == 0, done.stderr
    for flag in FIFTEEN:
        assert f'"{flag[2:]}"' in done.stdout
