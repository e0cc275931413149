"""What people type wrongly is answered by the key, the value and what to write instead."""

from __future__ import annotations

from pathlib import Path

import pytest

import penstock
from penstock.api.manifests import load_graph
from penstock.cli.main import main
from penstock.core.errors import ConfigError
from penstock.workload.traces import load_trace

SAMPLE = Path(__file__).parents[3] / "manifests/samples/disaggregated.yaml"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("ttft: 5s", "ttft: 5000", "spec.slo.ttft: 5000 is not a duration; write 5s or 5000ms"),
        (
            "runtime: simulated",
            "runtime: vLLM",
            "(a DNS label); write vllm",
        ),
        (
            "runtime: simulated",
            'runtime: simulated\n  image: "penstock :dev"',
            'spec.image: "penstock :dev" does not fit; use a container image without spaces, such as',
        ),
        (
            "policy: prefix-cost",
            "kvEventsPort: 80",
            "spec.router.kvEventsPort: 80 is too small; it must be at least 1024",
        ),
    ],
)
def test_a_slip_in_a_manifest_is_named(tmp_path: Path, old: str, new: str, words: str) -> None:
    """With its place; nothing of it is accepted in silence."""
    text = SAMPLE.read_text(encoding="utf-8")
    assert old in text
    file = tmp_path / "graph.yaml"
    file.write_text(text.replace(old, new), encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        load_graph(file)

    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("header", "lacking"),
    [
        ("TIMESTAMP,ContextTokens", "lacks the column GeneratedTokens of azure's CSV"),
        ("Timestamp,Model,Request tokens,Total tokens", "lacks the column Response tokens of burstgpt's CSV"),
        ("input_tokens,output_tokens", "lacks the column timestamp of servegen's CSV"),
    ],
)
def test_a_table_that_lacks_one_column_is_told_which(tmp_path: Path, header: str, lacking: str) -> None:
    """Instead of the list of all formats."""
    file = tmp_path / "trace.csv"
    file.write_text(f"{header}\n1,2\n", encoding="utf-8")

    with pytest.raises(ConfigError) as caught:
        load_trace(str(file))

    assert lacking in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "--rps", "3"], "--rps: no such option; write --rate"),
        (["load", "--qps", "3"], "--qps: no longer an option; write --rate"),
        (["load", "--num-prompts", "3"], "--num-prompts: no such option; write --limit"),
        (["simulate", "--budget", "3"], "--budget: no such option; write --max-gpus"),
    ],
)
def test_an_option_is_suggested_by_its_meaning(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The names that other tools have lead to this one's, and nothing is simulated before."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    assert ended.value.code == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert not shown.out


def test_a_graph_that_is_refused_at_once_does_not_start(capsys: pytest.CaptureFixture[str]) -> None:
    """Its refusal is the only line."""
    with pytest.raises(SystemExit):
        main(["up", str(SAMPLE), "--gpus", "1"])

    assert "starting" not in capsys.readouterr().err


def test_a_keyword_that_is_misspelt_is_suggested() -> None:
    """`compare` and `simulate` have some thirty."""
    with pytest.raises(TypeError, match="compare: there is no option polices; did you mean policies"):
        penstock.compare(polices=["queue"])  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="simulate: there is no option seed; did you mean seeds"):
        penstock.simulate(seed=1)  # type: ignore[call-arg]
