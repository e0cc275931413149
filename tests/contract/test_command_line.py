"""The command line: help with units and defaults, the planner's fifteen options, and one clear error each."""

import json
import re
import socket

import click
import pytest

from penstock.cli.main import cli, main

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
    r"|blocks?\b|[Bb]andwidth|arrivals|[Ff]actor|[Ww]orkers|Runs|[Pp]rocesses|[Hh]ow many|[Nn]umber of|Chooses|[Ss]eed|Of sampling|Prompts?"
)
GRAPH = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: g}
spec:
  model: {name: m}
  runtime: simulated
  services: {frontend: {role: router}, prefill: {role: prefill}, decode: {role: decode}}
  planner: {maxGpuBudget: 8}
"""
GOOD = '{"timestamp": 0, "input_length": 10, "output_length": 2, "hash_ids": [1]}\n'
FILES = {
    "torn.yaml": "metadata: {name: x\nspec: [\n",
    "corrupt.jsonl": GOOD + '{"timestamp": 3000, "input_le\n' + GOOD.replace(" 0,", " 6000,", 1),
    "empty.jsonl": "",
    "graph.yaml": GRAPH,
    "unknown.yaml": GRAPH.replace("maxGpuBudget:", "maxGpuBudgett:"),
    "flapping.yaml": GRAPH.replace("planner: {", "planner: {decodeKvScaleDownThreshold: 0.95, "),
    "poor.yaml": GRAPH.replace("maxGpuBudget: 8", "maxGpuBudget: 1"),
    "options.yaml": "Planner: {max-gpu-budgett: 3}\n",
}
BAD = [
    (("up", "torn.yaml"), ["torn.yaml:2", "malformed YAML", "check indentation"]),
    (("up", "absent.yaml"), ["absent.yaml", "no such file", "check the path"]),
    (("up", "unknown.yaml"), ["unknown.yaml:", "spec.planner.maxGpuBudgett", "did you mean maxGpuBudget?"]),
    (("up", "flapping.yaml"), ["decodeKvScaleDownThreshold: 0.95", "not below", "0.9", "lower it"]),
    (("up", "poor.yaml"), ["spec.planner.maxGpuBudget: 1", "fewer than the floors", "raise"]),
    (("up", "graph.yaml", "--speed", "inf"), ["--speed: inf", "finite number above 0"]),
    (("up", "graph.yaml", "--gpus", "1"), ["--gpus: 1", "starts with 2 GPUs (prefill 1 x 1, decode 1 x 1)", "give 2"]),
    (("statsu",), ["No such command 'statsu'; did you mean status?"]),
    (("simulate", "--policy", "duelmap"), ["--policy duelmap: choose from", "did you mean dualmap?"]),
    (("simulate", "--planner", "adptive"), ["--planner adptive: choose from", "did you mean adaptive?"]),
    (("demo", "--policy", "duelmap"), ["--policy", "did you mean dualmap?"]),
    (("samples", "disagregated"), ["NAME", "did you mean disaggregated?"]),
    (("planner", "replay", "torn.yaml"), ["torn.yaml:1", "this is not a ledger", "--log-dir"]),
    (("planner", "explain", "--log-dir", "absent"), ["absent: cannot be read", "--log-dir"]),
    (("up", "graph.yaml", "--port", "TAKEN"), ["--port", "TAKEN", "in use", "another"]),
    (("engine", "serve", "m", "--block-size", "0"), ["--block-size", "0 is not in the range x>=1"]),
    (("load", "--trace", "absent.jsonl"), ["--trace absent.jsonl", "no such file", "mooncake"]),
    (("load", "--trace", "empty.jsonl"), ["--trace empty.jsonl", "empty", "give a"]),
    (("load", "--trace", "corrupt.jsonl", "--dry-run"), ["corrupt.jsonl:2", "Invalid JSON", "--on-bad-row skip"]),
    (("load", "--trace", "mooncake", "--sample", "2"), ["--sample", "2.0 is not in the range 0<x<=1"]),
    (("planner", "run", "--decode-kv-scale-up-threshold", "0.3", "--dry-run"),
     ["--decode-kv-scale-down-threshold: 0.5", "not below", "0.3", "lower it"]),
    (("planner", "run", "--max-gpu-budget", "1"), ["--max-gpu-budget: 1", "below the floor of 1", "raise it"]),
    (("planner", "run", "--config", "options.yaml"), ["max-gpu-budgett", "unknown option", "known:"]),
    (("planner", "run", "--namespace", "nobody"), ["--namespace: 'nobody'", "penstock up"]),
    (("assess", "--model", "m"), ["--prometheus, --access-log and --trace", "exactly one"]),
    (("assess", "--prometheus", "http://127.0.0.1:9"), ["--model: required with --prometheus"]),
    (("assess", "--trace", "mooncake"), ["--replicas: required with --trace"]),
    (("assess", "--since", "soon"), ["--since soon: must be days, hours and minutes, as 7d, 36h or 1d12h"]),
    (("assess", "--prometheus", "x", "--model", "m", "--ttft-slo", "2"), ["--ttft-slo 2: must be a duration"]),
    (("planner", "explain"), ["--log-dir: required", "no graph is running"]),
]  # fmt: skip


def run(*arguments):
    """Run a `penstock` command in this process; return its exit status."""
    with pytest.raises(SystemExit) as ended:
        main(list(arguments))
    return ended.value.code or 0


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """Return the folder of the bad files, which is the working folder; local state would be written to `state`."""
    for name, content in FILES.items():
        (tmp_path / name).write_text(content)
    monkeypatch.setenv("PENSTOCK_LOCAL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


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


def test_the_planner_has_the_fifteen_options_with_the_documents_defaults():
    """Each exists on `planner run` by the document's name; its help shows the document's default."""
    command, context = find("planner run")
    by_flag = {flag: option for option in options(command) for flag in option.opts}
    for flag, default in FIFTEEN.items():
        assert f"[default: {default}]" in " ".join(by_flag[flag].get_help_record(context)[1].split())


def test_the_same_keys_hold_in_yaml(tmp_path, capsys):
    """Each of the fifteen names is read from the section `Planner` of a file."""
    keys = "".join(f"  {flag[2:]}: {value}\n" for flag, value in FIFTEEN.items() if value != "none")
    file = tmp_path / "planner.yaml"
    file.write_text("Planner:\n" + keys)
    assert run("planner", "run", "--config", str(file), "--dry-run") == 0
    shown = capsys.readouterr().out
    assert [flag for flag in FIFTEEN if f'"{flag[2:]}"' not in shown] == []


@pytest.mark.parametrize(("arguments", "words"), BAD, ids=lambda value: " ".join(value[:3]))
def test_bad_input_is_refused_with_key_value_bound_and_remedy(desk, capsys, arguments, words):
    """Exit 2 and one message on stderr; nothing was started or written."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        status = run(*(argument.replace("TAKEN", port) for argument in arguments))
    said = capsys.readouterr().err
    assert status == 2, said
    assert said.count("penstock: ") + said.count("Error: ") == 1, said
    assert [word for word in words if word.replace("TAKEN", port) not in said] == []
    assert list(desk.glob("state/*")) == []


def test_a_corrupt_row_is_left_out_on_request_and_counted(desk, capsys):
    """With --on-bad-row skip the other rows are planned, and the row that is not is named."""
    assert run("load", "--trace", "corrupt.jsonl", "--on-bad-row", "skip", "--dry-run") == 0
    trace = json.loads(capsys.readouterr().out)["trace"]
    assert trace["rows"] == 3
    assert [row.split(":")[0] for row in trace["skipped_rows"]] == ["line 2"]
    assert trace["output_tokens"] == 4
