"""`penstock profile` of engines that are started: real processes, ended and gone on with."""

import json
import re
import signal
import sys

import psutil
import pytest
import yaml
from patience import LIMIT_S

from penstock.profiler.journal import JOURNAL

SMALL = (
    *("--isl", 400, "--osl", 50, "--ttft-slo", "500ms", "--itl-slo", "50ms"),
    *("--max-context", 1024, "--max-concurrency", 12, "--gpus", 1),
)
PROGRAM = """#!{python}
import os, sys
model, given = sys.argv[2], dict(zip(sys.argv[3:], sys.argv[4:]))
kept = ("--served-model-name", "--host", "--port", "--max-model-len")
words = [word for flag in kept if flag in given for word in (flag, given[flag])]
worker = ["-m", "penstock.cli", "engine", "serve", model, "--profile", "h200-llama-3.1-8b-tp1", *words]
os.execv(sys.executable, [sys.executable, *worker])
"""
"""Stands for vLLM: takes its command line, and serves as a simulated worker."""


@pytest.fixture
def manifest(world):
    """A graph of runtime vllm whose program is that."""
    program = world.folder / "env" / "bin" / "vllm"
    program.parent.mkdir(parents=True)
    program.write_text(PROGRAM.format(python=sys.executable))
    program.chmod(0o755)
    path = world.manifest()
    graph = yaml.safe_load(path.read_text())
    graph["spec"]["runtime"] = "vllm"
    graph["spec"]["engine"] = {"pythonEnvironment": str(world.folder / "env")}
    path.write_text(yaml.safe_dump(graph))
    return path


def workers(folder):
    """The running workers of a profile's folder."""
    record = folder / "worker.json"
    if not record.exists():
        return []
    pid = json.loads(record.read_text())["pid"]
    return [pid] if psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE else []


def finished(folder):
    """Lines of the journal that are points."""
    path = folder / JOURNAL
    lines = path.read_text().splitlines() if path.exists() else []
    return [line for line in lines if '"kind":"prefill"' in line or '"kind":"decode"' in line]


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.nightly)])
def test_a_profile_that_was_ended_goes_on_where_it_stopped(world, manifest, eventually, tmp_path, number):
    """Finished points are not measured again; no worker stays, neither after Ctrl-C nor after the next run."""
    folder = tmp_path / "out"
    command = ("profile", "--config", manifest, *SMALL, "--output-dir", folder)
    first = world.start(*command, name="first")
    eventually(lambda: len(finished(folder)) >= 15, "fifteen points")
    first.send_signal(number)
    first.wait(LIMIT_S)
    kept = finished(folder)
    if number is signal.SIGINT:
        assert (first.returncode, workers(folder)) == (130, [])

    done = world.run(*command)

    assert done.returncode == 0, done.stderr
    assert finished(folder)[: len(kept)] == kept
    assert len(set(finished(folder))) == len(finished(folder))
    assert workers(folder) == []
    assert len(re.findall(r"^Suggested ", done.stdout, re.MULTILINE)) == 4

    changed = yaml.safe_load(manifest.read_text())
    changed["spec"]["engine"]["maxBatchTokens"] = 4096
    manifest.write_text(yaml.safe_dump(changed))
    refused = world.run(*command)
    assert refused.returncode == 2
    assert "measured under other conditions" in refused.stderr
