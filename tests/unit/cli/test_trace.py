"""`penstock trace info` and `convert`: what they print and write, and that a converted trace is the same."""

import json

import pytest

from penstock.report.trace_picture import draw_trace
from penstock.workload.trace_info import describe_trace
from penstock.workload.traces import load_trace

BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,230,1317,Conversation log
118,GPT-4,1360,0,1360,API log
200,ChatGPT,185,215,400,Conversation log
"""


@pytest.fixture
def burstgpt(tmp_path):
    """A synthetic file in BurstGPT's format, with a request that failed."""
    path = tmp_path / "burst.csv"
    path.write_text(BURSTGPT)
    return path


def test_the_packaged_trace(run, tmp_path):
    """As a table, as JSON and as a picture."""
    code, out, err = run("trace", "info", "mooncake", "--picture", tmp_path / "m.png")
    plain = json.loads(run("trace", "info", "mooncake", "--json")[1])

    assert code == 0, err
    assert "608 requests in 201.0 s" in out
    assert "batches of equal time" in out
    assert f"reuse {plain['reuse']['tokens_fraction']:.1%} of the prompt tokens" in out
    assert (plain["format"], plain["hash_tokens"], plain["prompts"]["most"]) == ("mooncake", 512, 121_298)
    assert (tmp_path / "m.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_of_a_trace_without_ids_has_no_panel_of_reuse(burstgpt):
    """An empty axis would look like no reuse; the title says that it is unknown."""
    trace = load_trace(burstgpt)
    figure = draw_trace("b.csv", describe_trace(trace), trace.requests)
    assert [axes.get_title() for axes in figure.axes] == ["Arrivals", "Lengths"]
    assert figure.get_suptitle() == "b.csv: 3 requests; no ids, so reuse is unknown"


def test_a_trace_without_ids_says_what_it_cannot_know(run, burstgpt):
    """And what was left out."""
    code, out, err = run("trace", "info", burstgpt)

    assert code == 0
    assert "reuse unknown: no row has hash_ids" in out
    assert "1 rows left out, the first in line 4: Response tokens: 0" in err


@pytest.mark.parametrize("source", ["mooncake", "poisson:rate=4,count=50,input_tokens=900,share=0.5"])
def test_a_converted_trace_is_the_same(run, tmp_path, source):
    """Lengths, times and what is shared; ids and all."""
    path = tmp_path / "out.jsonl"
    code, _, err = run("trace", "convert", source, "--output", path)
    before = json.loads(run("trace", "info", source, "--json")[1])
    after = json.loads(run("trace", "info", path, "--json")[1])

    assert code == 0, err
    for key in ("requests", "prompts", "answers", "reuse"):
        assert after[key] == before[key], key
    assert after["span_s"] == pytest.approx(before["span_s"], abs=0.002)


def test_a_part_is_converted_at_another_rate(run, burstgpt, tmp_path):
    """The window, the rate and the longest prompt are chosen as with `penstock load`."""
    path = tmp_path / "out.jsonl"
    chosen = ("--start-s", 40, "--rate", 1, "--max-input-tokens", 1000, "--on-long", "truncate")
    code, _, err = run("trace", "convert", burstgpt, "--output", path, *chosen)
    rows = [(each.arrival_s, each.input_tokens) for each in load_trace(str(path)).requests]

    assert code == 0
    assert "wrote 2 of 3 requests" in err
    assert "(1 cut)" in err
    assert rows == [(0, 1000), (1, 185)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("info", "moonkake"), "no such file"),
        (("info", "mooncake", "--picture", "x.docx"), "--picture x.docx: Format 'docx' is not supported"),
        (("convert", "mooncake"), "Missing option '--output'"),
        (("convert", "mooncake", "--output", "/no/such/file"), "--output /no/such/file"),
        (("info", "mooncake", "--block-tokens", 16), "must be 423 of 16 tokens"),
    ],
)
def test_what_cannot_be_done_is_refused(run, arguments, said):
    """With 2, and the option named."""
    code, _, err = run("trace", *arguments)

    assert code == 2
    assert said in " ".join(err.split())
