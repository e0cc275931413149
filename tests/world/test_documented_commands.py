"""The commands of docs/ are run as written, page by page and in their order; files, ports and lengths are the test's.

The README's are in test_readme.py. Not run: what serves until it is stopped, and what needs a cluster, vLLM or Dynamo.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DGD = "manifests/import/dgd-planner-v1beta1.yaml"
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.1+00:00,2162,5\n2024-05-10 00:00:09+00:00,100,15\n"
SIZES = " ".join(f"--profile h100-llama-3.3-70b-tp{size}" for size in (2, 4, 8))


def blocks(page):
    """The blocks of a page, without their marks."""
    return re.findall(
        r"^```\w*\n(.*?)^```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )


def commands(page, *, but=()):
    """The `penstock` commands of a page's blocks in their order; those that begin like one of ``but`` are left out."""
    lines = "".join(blocks(page)).replace("\\\n", " ").splitlines()
    found = [" ".join(line.split("  #")[0].split()) for line in lines if line.startswith("penstock ")]
    return [line for line in found if not line.startswith(tuple(f"penstock {each}" for each in but))]


@pytest.fixture
def reader(world, tmp_path):
    """Return what runs a line as a reader would, in a folder that has the samples; it says what the line printed."""
    (tmp_path / "manifests").symlink_to(ROOT / "manifests")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])

    def run(line, *, replaced=(), more="", statuses=(0,)):
        for old, new in replaced:
            line = line.replace(old, str(new))
        done = subprocess.run(
            ["/bin/sh", "-c", f"{line} {more}".replace("--watch", "")],
            cwd=tmp_path,
            env={**world.env, "PATH": path, "COLUMNS": "120"},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode in statuses, (line, done.stdout[-2000:], done.stderr[-2000:])
        return done.stdout

    return run


def test_what_a_profile_wrote_is_started(world, reader):
    """The page's two commands; then nothing is left."""
    world.statefile = world.statefile.with_name("llama.json")
    profile, up = commands("profile.md")
    reader(profile)
    reader(up, more=f"--port {world.port}")
    reader(commands("local.md", but=("demo", "restart"))[2])
    assert world.marked() == {}


def test_the_commands_about_a_running_graph(world, reader, tmp_path, eventually):
    """Up at a speed, load, report, status, explain, replay, doctor, down."""
    world.statefile = world.statefile.with_name("llama.json")
    ledger = world.ledger_dir = tmp_path / "state" / "log" / "llama" / "planner"
    shutil.copy(ROOT / "manifests" / "samples" / "disaggregated.yaml", tmp_path / "graph.yaml")
    up, status, restart, down = commands("local.md", but=("demo",))[:4]
    reader(up, more=f"--port {world.port}")
    load, report, *_ = commands("load.md", but=("up", "make-model", "trace"))
    here = (("http://127.0.0.1:8000", world.url), ("PLANNER_LOG_DIR", ledger))
    assert "40 ok" in reader(load, replaced=here, more="--limit 40")
    reader(report, replaced=here)
    reader(
        commands("load.md", but=("up", "load", "make-model", "trace"))[1],
        replaced=here,
        more="--counterfactual-fleets 2",
    )
    assert "llama" in reader(status)
    last = eventually(world.decisions, "a recorded decision")[-1]["decision"]["id"]
    recorded = (
        ("--id d000012 --json", f"--id {last} --json --log-dir log/planner"),
        ("log/planner", ledger),
        ("TRACE FILE", "mooncake memory.json"),
    )
    for line in commands("planner.md", but=("planner run",)):
        reader(line, replaced=recorded)
    for line in commands("alerts.md", but=("doctor -n",)):
        reader(line, replaced=(("~/.penstock/log/GRAPH/planner", ledger),), statuses=(0, 1))
    reader(restart)
    reader(down)
    assert world.marked() == {}


def test_the_commands_that_need_no_graph(reader):
    """Imports, latency profiles, and the table of docs/capacity.md as its command prints it."""
    name = re.search(r"^  name: (\S+)", (ROOT / DGD).read_text(encoding="utf-8"), re.MULTILINE)
    for line in commands("dynamo-import.md"):
        reader(line, replaced=(("FILE", DGD), ("NAME", name[1])), statuses=(0, 1))
    for line in commands("load.md", but=("load", "report", "up", "make-model")):
        reader(line, replaced=(("FILE", "mooncake"),))
    for line in commands("engine.md", but=("engine serve",)):
        assert "a100-llama-8b-bf16-tp1" in reader(line)
    command, table, *_ = blocks("capacity.md")
    printed = reader(command.strip(), replaced=(("--profile profile/", SIZES),))
    assert printed.split() == table.split()


@pytest.mark.nightly
def test_the_commands_of_the_simulator(reader, tmp_path):
    """With one seed and one rate; graph and traces are small ones."""
    shutil.copy(ROOT / "manifests" / "samples" / "disaggregated.yaml", tmp_path / "graph.yaml")
    (tmp_path / "azure.csv").write_text(AZURE)
    data = ROOT / "src" / "penstock" / "workload" / "data" / "mooncake_conversation_slice.jsonl"
    shutil.copy(data, tmp_path / "conversation.jsonl")
    fewer = (("--seeds 5", "--seeds 1"), ("2,3,4", "2"), ("4,5,6,7,8", "4"), ("5,15", "5"))
    for line in commands("simulate.md"):
        assert "in time" in reader(line, replaced=fewer)
