"""No command lets text of files, peers or arguments move the terminal: each is run with hostile text."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.table import Table
from rich.text import Text

from penstock.cli.main import cli, main
from penstock.cli.terminal import Terminal

EVIL = "\x1b[2J\x1b]0;owned\x07\u202e\x9b31m"
HIDDEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
CLI = Path(__file__).parents[2] / "src" / "penstock" / "cli"

GRAPH = (
    f"""\
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {{name: "evil{EVIL}"}}
spec: {{model: {{name: "{EVIL}"}}, "{EVIL}": 1}}
""".replace("\x1b", "\\e")
    .replace("\x07", "\\a")
    .replace("\x9b", "\\x9b")
    .replace("\u202e", "\\u202e")
)


def ledger():
    """A ledger whose sentences and keys are hostile."""
    role = {
        "role": EVIL,
        "current": 1,
        "desired": 2,
        "reason": EVIL,
        "sentence": EVIL,
        "steps": [],
        "action": EVIL,
    }
    decision = {"id": EVIL, "roles": [role], "no_operation": False, "at_s": 1.0}
    header = {"type": "header", "schema": 1, "version": EVIL, "at_s": 0.0}
    made = {"type": "decision", "at_s": 1.0, "origin_s": 0.0, "kind": EVIL, "decision": decision}
    return "".join(json.dumps(each) + "\n" for each in (header, made))


def statefile():
    """A statefile of a graph that is gone, with hostile words."""
    arbiter = {"pid": 1, "namespace": "evil", "model": EVIL, "log_dir": EVIL, "router_url": f"http://{EVIL}"}
    return json.dumps({"arbiter": arbiter, EVIL: {"role": EVIL, "state": EVIL, "reason": EVIL}})


INVOCATIONS = {
    "up": ["graph.yaml"],
    "load": ["--trace", EVIL],
    "status": [],
    "down": [],
    "pool": [EVIL],
    "demo": ["--manifest", "graph.yaml", "--output-dir", "out"],
    "dashboard": ["--log-dir", EVIL],
    "trace info": [EVIL],
    "trace convert": [EVIL, "--output", "out.jsonl"],
    "simulate": ["--policy", EVIL],
    "profile": ["--from", "graph.yaml"],
    "capacity": [
        "--profile",
        EVIL,
        "--isl",
        "100",
        "--osl",
        "10",
        "--rps",
        "1",
        "--ttft-slo",
        "100ms",
        "--itl-slo",
        "10ms",
    ],
    "assess": ["--trace", EVIL, "--replicas", "1"],
    "report": ["--run", EVIL, "--output", "out"],
    "samples": [EVIL],
    "validate": ["graph.yaml"],
    "render": ["graph.yaml"],
    "import": ["graph.yaml"],
    "router serve": ["--graph", "graph.yaml"],
    "router pick": ["--graph", "graph.yaml"],
    "planner run": ["--graph", "graph.yaml", "--environment", "local"],
    "planner decide": ["graph.yaml"],
    "planner explain": ["--log-dir", "ledger.jsonl"],
    "planner replay": ["ledger.jsonl"],
    "planner memory show": ["--log-dir", "ledger.jsonl"],
    "planner memory export": ["--log-dir", "ledger.jsonl", "out.json"],
    "planner memory from-trace": [EVIL, "out.json", "--manifest", "graph.yaml"],
    "planner memory reset": ["--log-dir", EVIL],
    "restart": [EVIL],
    "make-model": ["graph.yaml"],
    "engine serve": [EVIL, "--profile", EVIL],
    "engine profiles": [EVIL],
    "operator run": ["--namespace", EVIL, "--kubeconfig", EVIL],
    "operator finish-drains": ["--namespace", EVIL, "--kubeconfig", EVIL],
    "doctor": ["--local"],
    "completion": [EVIL],
}


def leaves(command: click.Command, name: str = "") -> list[str]:
    """The names of all commands below one."""
    if not isinstance(command, click.Group):
        return [name.strip()]
    context = click.Context(command)
    below = {each: command.get_command(context, each) for each in command.list_commands(context)}
    return [
        leaf for each, found in below.items() if found is not None for leaf in leaves(found, f"{name} {each}")
    ]


def test_every_command_is_run_here():
    """A new one comes with its hostile invocation."""
    assert sorted(leaves(cli)) == sorted(INVOCATIONS)


@pytest.mark.parametrize("name", INVOCATIONS)
@pytest.mark.parametrize("more", [[], ["--json"]])
def test_hostile_text_is_shown_by_its_escapes(tmp_path, monkeypatch, capsys, name, more):
    """In output, errors and JSON alike, whatever the command says to it."""
    for file, text in (("graph.yaml", GRAPH), ("ledger.jsonl", ledger()), ("state/evil.json", statefile())):
        path = tmp_path / file
        path.parent.mkdir(mode=0o700, exist_ok=True)
        path.write_text(text)
        path.chmod(0o600)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PENSTOCK_LOCAL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(SystemExit):
        main([*name.split(), *INVOCATIONS[name], *more])
    said = capsys.readouterr()
    assert (said.out + said.err).strip()
    assert HIDDEN.search(said.out + said.err) is None


def test_a_console_shows_escapes_in_every_kind_of_text():
    """Plain, in a table's cell, in a title; its own sequences pass."""
    console = Terminal(width=200, force_terminal=False)
    table = Table(title=EVIL)
    table.add_column(EVIL)
    table.add_row(Text(EVIL))
    with console.capture() as printed:
        console.print(table, EVIL, Text(EVIL))
    assert HIDDEN.search(printed.get()) is None
    assert r"\x1b[2J" in printed.get()


def test_commands_print_by_say_and_terminal_alone():
    """Neither click's echo nor rich's own console is in a module of a command."""
    for path in CLI.glob("*.py"):
        if path.name in {"say.py", "terminal.py"}:
            continue
        tree = ast.parse(path.read_text())
        called = {ast.unparse(each.func) for each in ast.walk(tree) if isinstance(each, ast.Call)}
        assert not called & {"click.echo", "click.secho", "print", "Console", "sys.stdout.write"}, path


def test_json_stays_json():
    """Control characters are written as JSON writes them."""
    done = CliRunner().invoke(cli, ["validate", "nowhere\u202e.yaml", "--json"])
    assert json.loads(done.stdout)["files"][0]["file"] == "nowhere\u202e.yaml"
    assert HIDDEN.search(done.stdout) is None
