"""Broken traces and ledgers: what can be read is read, anything else is an error of ours that names the file."""

from pathlib import Path

import pytest

from penstock.core.errors import PenstockError
from penstock.workload.traces import OnBadRow, load_trace
from penstock_planner.ledger import read_ledger
from penstock_planner.replay import replay

MOONCAKE = b'{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [0, 1]}\n' * 3
AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:04.0,1,2\n"
TURNS = b'{"timestamp": 0, "session_id": "a", "input_length": 600, "output_length": 40}\n{"session_id": "a", "input_length": 9, "output_length": 4, "delay": 500}\n'
BURSTGPT = b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n5,ChatGPT,472,18,490,C\n6,ChatGPT,1,0,1,C\n"
BAILIAN = b'{"chat_id": 1, "timestamp": 6.1, "input_length": 20, "output_length": 1, "hash_ids": [1, 2]}\n'
LEDGER = (Path(__file__).parent / "data" / "ledger.jsonl").read_bytes()
TOKENS = [
    b"\n", b"\r\n", b"\0", b"\xff\xfe", b"{", b"}", b"[", b"]" * 500, b"[" * 5000, b",", b'"', b"null", b"true", b"-1", b"1e999",
    b"NaN", b"9" * 400, b'"timestamp"', b'"hash_ids"', b'"type": "header"', b'"type":"decision"', b'"held":99', b"0.5", b'""',
]  # fmt: skip


def _attempt(name, data, read):
    try:
        read()
    except PenstockError:
        pass
    except BaseException as exc:
        exc.add_note(f"{name} data={data[:400]!r}")
        raise


@pytest.mark.parametrize("on_bad_row", OnBadRow)
def test_any_file_is_a_trace_or_refused(rounds, mutate, tmp_path, on_bad_row):
    """Arrivals never run backwards and lengths are counts, whatever the file holds."""

    def read():
        trace = load_trace(str(path), on_bad_row=on_bad_row)
        arrivals = [each.arrival_s for each in trace.requests]
        assert arrivals == sorted(arrivals)
        assert all(each.input_tokens >= 0 and each.output_tokens >= 0 for each in trace.requests)

    path = tmp_path / "trace"
    for name, rng in rounds:
        data = mutate(rng, [MOONCAKE, AZURE, TURNS, BURSTGPT, BAILIAN], TOKENS)
        path.write_bytes(data)
        _attempt(name, data, read)


def test_any_ledger_is_replayed_or_refused(rounds, mutate, tmp_path):
    """A ledger that was cut, edited or filled with noise ends in a count of differences, or in an error with its line."""
    path = tmp_path / "ledger.jsonl"
    for name, rng in rounds:
        data = mutate(rng, [LEDGER, LEDGER + LEDGER], TOKENS)
        path.write_bytes(data)
        _attempt(name, data, lambda: replay(read_ledger(path)))
