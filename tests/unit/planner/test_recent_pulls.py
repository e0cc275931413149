"""Which of the ledger's pulls a restarted planner takes: the last ones, of its own clock, across a rotation."""

from __future__ import annotations

import pytest

from penstock.core.errors import LedgerError
from penstock.planner.core.recent_pulls import recent_pulls
from penstock.planner.core.records import pull_record
from penstock.planner.decide.observation import NO_WORKERS, Demand, Pull
from penstock.planner.ledger import Ledger


def _pull(at_s):
    return Pull(float(at_s), {}, NO_WORKERS, None, Demand(1.0, arrivals=2.0))


def _anchor(at_s, timeline="boot@1"):
    return {"type": "settled", "at_s": float(at_s), "timeline": timeline}


def _header(at_s, timeline="boot@1"):
    return {**_anchor(at_s, timeline), "type": "header", "schema": 1}


def _written(ledger, *times_s):
    for at_s in times_s:
        ledger.append(pull_record(_pull(at_s), 0))
        if at_s % 10 == 0:
            ledger.append(_anchor(at_s))


def _found(ledger, span_s, timeline="boot@1"):
    return [each.at_s for each in recent_pulls(ledger.backward(), timeline=timeline, span_s=span_s)]


def test_pulls_of_the_span_come_back_in_order_across_a_rotation(tmp_path):
    """At least the last 25 s; the anchor before them tells whose they are."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.begin(_header(0))
    _written(ledger, *range(1, 71))
    ledger.rotate(_header(70))
    _written(ledger, *range(71, 83))
    assert _found(ledger, 25.0) == list(map(float, range(51, 83)))
    assert _found(ledger, 1000.0) == list(map(float, range(1, 83)))
    assert next(iter(recent_pulls(ledger.backward(), timeline="boot@1", span_s=5.0))) == _pull(71)
    ledger.close()


def test_pulls_of_another_clock_are_left_out(tmp_path):
    """Before a reboot times count from elsewhere; what nobody vouches for is left out too."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.begin(_header(0, "boot@20"))
    for at_s in (995, 996):
        ledger.append(pull_record(_pull(at_s), 0))
    ledger.append(_header(1000))
    _written(ledger, 1001, 1002)
    assert _found(ledger, 1000.0) == [1001.0, 1002.0]
    assert _found(ledger, 1000.0, "boot@20") == []
    ledger.close()


def test_an_empty_ledger_has_none_and_a_broken_line_is_said(tmp_path):
    """The planner starts either way."""
    ledger = Ledger(tmp_path / "ledger.jsonl")
    assert _found(ledger, 10.0) == []
    ledger.append(_header(0))
    ledger.append({"type": "pull"})
    with pytest.raises(KeyError):
        _found(ledger, 10.0)
    ledger.close()
    ledger.path.write_bytes(b"not json\n" + ledger.path.read_bytes())
    with pytest.raises(LedgerError, match="not JSON"):
        list(Ledger(ledger.path).backward())
