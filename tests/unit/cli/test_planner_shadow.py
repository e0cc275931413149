"""What `penstock planner run --shadow` and `penstock report` refuse: one sentence with the flag and the remedy."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.main import main

SAMPLES = Path(__file__).parents[3] / "manifests/samples"
NAMED = ("--prometheus-url", "http://127.0.0.1:1", "--served-model-name", "llama")
WATCHING = ("--no-operation", "--shadow", "vllm", *NAMED)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--shadow", "vllm", *NAMED), "--shadow: only watches; add --no-operation"),
        (("--no-operation", "--shadow", "vllm", *NAMED[2:]), "--prometheus-url: required with --shadow"),
        (("--no-operation", "--shadow", "vllm", *NAMED[:2]), "--served-model-name: required with --shadow"),
        ((*WATCHING, "--environment", "kubernetes"), "so leave out --environment kubernetes"),
        ((*WATCHING, "--router-url", "http://a:1"), "--router-url: has no effect with --shadow"),
        ((*WATCHING, "--kubeconfig", "x"), "--kubeconfig: has an effect only with --replicas-from scale"),
        (("--no-operation", "--shadow", "{}", *NAMED, "--replicas-from", "scale"), "aggregated={} names no Deployment"),
        (("--no-operation", "--match", 'a="b"'), "--match: has an effect only with --shadow"),
        ((*WATCHING, "--graph", str(SAMPLES / "disaggregated.yaml")), "the roles must be the same"),
        (WATCHING, "nothing answers at 127.0.0.1:1; start it, or correct --prometheus-url"),
    ],
)  # fmt: skip
def test_a_shadow_planner_that_cannot_run_says_why(given, said, capsys, monkeypatch, tmp_path):
    """Nothing is written before the server has answered."""
    monkeypatch.setenv("PENSTOCK_LOCAL_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["planner", "run", *given])
    assert ended.value.code
    assert said in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((), "--run: required; give the output directory of `penstock load`, or a shadow planner's --ledger"),
        (("--ledger", "away"), "away: cannot be read"),
        (("--ledger", "away", "--manifest", str(SAMPLES / "disaggregated.yaml")), "--manifest: has an effect only with --run"),
        (("--ledger", "away", "--itl-slo", "50ms"), "--itl-slo: a shadow report compares first tokens only"),
        (("--run", "away", "--profile", "x"), "--profile: has an effect only without --run"),
    ],
)  # fmt: skip
def test_a_shadow_report_that_cannot_be_made_says_why(given, said, capsys, monkeypatch, tmp_path):
    """A load run's report keeps its own flags."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["report", "--output", "out", *given])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
