"""Finished points survive a kill, and are taken for what they were measured as."""

import pytest

from penstock.core.errors import ConfigError
from penstock.performance.sweep import DecodePoint, PrefillPoint
from penstock.profiler.journal import JOURNAL, Journal
from penstock.profiler.points import Phase

CONDITIONS = {"decode": "worker --a 1", "prefill": "worker --a 1"}
PREFILL = PrefillPoint(100.0, 0.02)
DECODE = DecodePoint(512.0, 4.0, 0.01, 400.0)


def filled(folder):
    """A journal of one engine with a point of each phase, and a batch that does not run."""
    journal = Journal(folder)
    journal.begin(1, "TP1", CONDITIONS)
    journal.set_kv_tokens(1, Phase.PREFILL, 1000)
    journal.set_kv_tokens(1, Phase.DECODE, 1000)
    journal.set_prefill(1, 100, PREFILL)
    journal.set_decode(1, 512, 4, DECODE)
    journal.set_decode(1, 512, 9, None)
    journal.close()


def test_points_are_there_again(tmp_path):
    """Of the same engine under the same conditions."""
    filled(tmp_path)
    journal = Journal(tmp_path)
    journal.begin(1, "TP1", CONDITIONS)

    assert journal.prefill(1, 100) == PREFILL
    assert journal.has_decode(1, 512, 9)
    assert journal.kv_tokens(1, Phase.DECODE) == 1000
    assert journal.row(1, 512) == [DECODE]
    sweep = journal.engine_sweep(1)
    assert (sweep.prefill, sweep.decode, sweep.name) == ((PREFILL,), (DECODE,), "TP1")
    journal.close()


def test_a_line_that_a_kill_tore_is_forgotten(tmp_path):
    """What follows it is whole again."""
    filled(tmp_path)
    path = tmp_path / JOURNAL
    path.write_text(path.read_text() + '{"kind": "prefill", "gpus": 1, "ask')
    journal = Journal(tmp_path)
    journal.begin(1, "TP1", CONDITIONS)
    journal.set_prefill(1, 200, PREFILL)
    journal.close()

    again = Journal(tmp_path)
    assert again.prefill(1, 200) == PREFILL
    again.close()


def test_other_conditions_are_refused_and_named(tmp_path):
    """Figures of two settings must not be mixed."""
    filled(tmp_path)
    journal = Journal(tmp_path)

    with pytest.raises(
        ConfigError, match="decode was 'worker --a 1', now 'worker --a 2'; give another --output-dir"
    ):
        journal.begin(1, "TP1", {**CONDITIONS, "decode": "worker --a 2"})
    journal.begin(2, "TP2", {**CONDITIONS, "decode": "worker --a 2"})
    journal.close()


@pytest.mark.parametrize("line", ["[]", '{"kind": "prefill"}', "rubbish", '{"gpus": 1, "kind": "engine"}'])
def test_a_file_that_is_no_journal_is_refused_with_its_line(tmp_path, line):
    """It is not overwritten."""
    (tmp_path / JOURNAL).write_text(line + "\n")

    with pytest.raises(ConfigError, match=f"{JOURNAL}:1: not a line of a profile"):
        Journal(tmp_path)
