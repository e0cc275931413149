"""`penstock dashboard` starts TensorBoard or kubectl, or says what is missing."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli import dashboard as module
from penstock.cli.dashboard import dashboard
from penstock.core.errors import ClusterError, ConfigError, NotFoundError

KUBECTL = """#!/bin/sh
echo "$@" >> {calls}
cat {answer}
exit {status}
"""


@pytest.fixture
def started(monkeypatch):
    """What would replace the process."""
    commands = []
    monkeypatch.setattr(module.os, "execvp", lambda _program, command: commands.append(command))
    return commands


@pytest.fixture
def kubectl(tmp_path: Path, monkeypatch):
    """Put a kubectl on PATH that answers with services by namespace; return the file of its calls."""

    def make(*namespaces: str, status: int = 0) -> Path:
        items = [
            {
                "metadata": {"namespace": each, "name": "penstock-tensorboard"},
                "spec": {"ports": [{"port": 80}]},
            }
            for each in namespaces
        ]
        calls, answer = tmp_path / "calls", tmp_path / "answer"
        answer.write_text(json.dumps({"items": items}))
        program = tmp_path / "kubectl"
        program.write_text(KUBECTL.format(calls=calls, answer=answer, status=status))
        program.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return calls

    return make


def run(*arguments: object):
    """Run the command; its errors are raised."""
    return CliRunner().invoke(
        dashboard, list(map(str, arguments)), catch_exceptions=False, standalone_mode=False
    )


def test_a_folder_is_shown_by_tensorboard(tmp_path, started):
    """With this environment's Python, at the port asked for; the address is printed first."""
    (tmp_path / "ready").mkdir()
    (tmp_path / "ready" / "events.out.tfevents.1").touch()
    done = run("--log-dir", tmp_path, "--port", 6116)
    assert started == [
        [sys.executable, "-m", "tensorboard.main", "--logdir", str(tmp_path), "--port", "6116"]
    ]
    assert "http://localhost:6116/#custom_scalars&_smoothingWeight=0" in done.stdout


def test_the_chart_s_tensorboard_is_forwarded(kubectl, started):
    """From the one namespace that has it, to the port of its Service."""
    calls = kubectl("serving")
    run("--kubernetes", "--context", "kind-a")
    (command,) = started
    assert " ".join(command) == (
        "kubectl --context kind-a port-forward --namespace serving service/penstock-tensorboard 6006:80"
    )
    assert calls.read_text().startswith("--context kind-a get services --all-namespaces --selector app.kub")


@pytest.mark.parametrize(
    ("arguments", "cluster", "error"),
    [
        (["--kubernetes"], ([], 0), NotFoundError("helm upgrade")),
        (["--kubernetes"], (["b", "a"], 0), ConfigError("--namespace: TensorBoard runs in a, b")),
        (["--kubernetes"], ([], 1), ClusterError("kubectl")),
        (["--kubernetes", "--log-dir", "x"], ([], 0), ConfigError("--log-dir: with --kubernetes")),
        (["--context", "x"], ([], 0), ConfigError("--context: needs --kubernetes")),
    ],
)
def test_what_cannot_be_shown_says_why(kubectl, started, arguments, cluster, error):
    """With what to do about it; nothing is started."""
    namespaces, status = cluster
    kubectl(*namespaces, status=status)
    with pytest.raises(type(error), match=str(error)):
        run(*arguments)
    assert started == []


def test_a_folder_without_a_dashboard_is_refused(tmp_path, started):
    """TensorBoard would open an empty page."""
    with pytest.raises(ConfigError, match="has no dashboard yet"):
        run("--log-dir", tmp_path)
    assert started == []
