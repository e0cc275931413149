"""The README's own commands and client code, run as written; port, home and the replay's length are the test's."""

import json
import re
import runpy
import shlex
import sys
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUDGET = 8
REQUESTS = 300
NOT_RUN = {"eval": "changes the shell", "pip": "installs", "uvx": "installs"}


def blocks(language):
    """Return the README's code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def use_it():
    """Return the commands of the section on use, as lists of words."""
    lines = next(block for block in blocks("sh") if "penstock up" in block).splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_the_readmes_commands_and_client_run_and_the_budget_holds_at_every_instant(
    world, watch, monkeypatch, eventually, free_port
):
    """Up, replay, status, explain, dashboard, down: each exits 0; pools grow; GPUs never exceed the budget, ids are exclusive."""
    monkeypatch.chdir(ROOT)
    world.statefile = world.statefile.with_name("llama.json")
    world.ledger_dir = world.folder / "state" / "log" / "llama" / "planner"
    commands = [words for words in use_it() if words[0] not in NOT_RUN]
    assert [words[1] for words in commands] == [
        "doctor",
        "samples",
        "up",
        "load",
        "status",
        "planner",
        "dashboard",
        "down",
    ]
    with watch(BUDGET) as seen:
        for words in commands:
            match words[1]:
                case "up":
                    words += ["--port", str(world.port)]
                case "load":
                    run_client(world)
                    words += ["--limit", str(REQUESTS)]
                case "dashboard":
                    open_dashboard(world, words[1:], free_port(), eventually)
                    continue
            here = [word.replace("http://127.0.0.1:8000", world.url) for word in words if word != "--watch"]
            done = world.run(*here[1:])
            assert done.returncode == 0, (words, done.stdout, done.stderr)
            if words[1] == "load":
                assert f"{REQUESTS} ok, 0 failed, 0 rejected of {REQUESTS} requests" in done.stdout, (
                    done.stdout
                )
            if words[1] == "status":
                eventually(lambda: len(world.decisions()) >= 5, "five decisions to explain")
    assert seen.problems == []
    assert seen.looks > 100
    assert seen.most_gpus > 2, "pools grew from one worker each"
    assert world.marked() == {}
    assert not world.statefile.exists()
    assert "0 differences" in world.replay_ledger()


def open_dashboard(world, words, port, eventually):
    """Run what serves until stopped, and load its page."""
    process = world.start(*words, "--port", port, name="dashboard")

    def serves():
        assert process.poll() is None, (world.folder / "dashboard.out").read_text()
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/data/runs") as answer:
                return "planner" in json.load(answer)
        except OSError:
            return False

    eventually(serves, "TensorBoard shows the planner")
    process.terminate()
    process.wait()


def run_client(world):
    """Run the README's Python against this test's router and read its stream to the end."""
    (code,) = blocks("python")
    script = world.folder / "client.py"
    script.write_text(code.replace("http://127.0.0.1:8000", world.url))
    made = runpy.run_path(str(script))
    chunks = list(made["stream"])
    made["stream"].close()
    made["client"].close()
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
    assert len("".join(chunk.choices[0].text for chunk in chunks if chunk.choices)) <= 4 * 16
    assert chunks[-1].choices[0].finish_reason in {"stop", "length"}
    assert "openai" in sys.modules
