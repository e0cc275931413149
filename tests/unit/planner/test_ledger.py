from __future__ import annotations

import errno
import os

import orjson
import pytest

from penstock.core.errors import ConfigError, LedgerError
from penstock_planner.core.records import SCHEMA
from penstock_planner.decide.codec import from_plain
from penstock_planner.decide.demand.observation import Pull
from penstock_planner.ledger import Ledger, read_ledger

ANCHORS = frozenset({"decision"})


def _full_disk(*_args):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture(name="ledger")
def _ledger(tmp_path):
    made = Ledger(tmp_path / "log" / "ledger.jsonl")
    yield made
    made.close()


def _lines(ledger):
    return [orjson.loads(line) for line in ledger.path.read_bytes().splitlines()]


def test_a_torn_last_line_is_dropped_with_a_note(ledger):
    """A kill in the middle of a write costs that record only, for readers and for the next writer."""
    ledger.append({"type": "pull", "slot": 1})
    ledger.close()
    with ledger.path.open("ab") as file:
        file.write(b'{"type":"pull","sl')
    found = read_ledger(ledger.path)
    assert [r["slot"] for r in found.records] == [1]
    assert found.notes == (f"{ledger.path}:2: torn last line of 18 bytes dropped",)
    ledger.append({"type": "pull", "slot": 2})
    assert [r["slot"] for r in _lines(ledger)] == [1, 2]


def test_a_corrupt_middle_line_names_its_number(ledger):
    """What was once whole is not dropped silently."""
    ledger.path.parent.mkdir()
    ledger.path.write_bytes(b'{"type":"pull"}\n{"type":"pu\x00\n{"type":"pull"}\n')
    with pytest.raises(LedgerError, match=r"ledger\.jsonl:2: not JSON"):
        read_ledger(ledger.path)
    with pytest.raises(LedgerError, match=r"ledger\.jsonl:2: not JSON"):
        ledger.tail()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b"[1]\n", "not a ledger record"),
        (b'{"at_s":1}\n', "not a ledger record"),
        (b'{"type":"header","schema":99}\n', "schema 99, this version reads 1 and 2"),
    ],
)
def test_what_is_no_record_of_this_version_is_refused(tmp_path, line, message):
    """A reader never guesses."""
    path = tmp_path / "ledger.jsonl"
    path.write_bytes(line)
    with pytest.raises(LedgerError, match=message):
        read_ledger(tmp_path)


def test_a_full_disk_leaves_only_whole_records(ledger, monkeypatch):
    """Half a line is cut off again, the error is counted, and the next record follows the last whole one."""
    ledger.append({"type": "pull", "slot": 1})
    real = os.pwrite
    calls = []

    def half_then_full(descriptor, data, position):
        calls.append(len(data))
        if len(calls) == 1:
            return real(descriptor, bytes(data)[:9], position)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", half_then_full)
    with pytest.raises(
        LedgerError, match="cannot be written: No space left on device; free or repair the disk"
    ):
        ledger.append({"type": "decision"}, durable=True)
    monkeypatch.undo()
    assert ledger.errors == 1
    assert ledger.path.read_bytes().endswith(b"\n")
    ledger.append({"type": "decision"}, durable=True)
    assert [r["type"] for r in _lines(ledger)] == ["pull", "decision"]


def test_a_decision_that_does_not_reach_the_disk_is_not_in_the_ledger(ledger, monkeypatch):
    """Fsync failing means unrecorded."""
    ledger.append({"type": "pull"})
    monkeypatch.setattr(os, "fsync", _full_disk)
    with pytest.raises(LedgerError):
        ledger.append({"type": "decision"}, durable=True)
    monkeypatch.undo()
    assert [r["type"] for r in _lines(ledger)] == ["pull"]


def test_a_header_that_could_not_be_written_comes_before_the_first_record_that_can(ledger, monkeypatch):
    """A run without its header could not be replayed."""
    monkeypatch.setattr(os, "pwrite", _full_disk)
    ledger.begin({"type": "header", "schema": SCHEMA})
    with pytest.raises(LedgerError):
        ledger.append({"type": "decision"})
    monkeypatch.undo()
    ledger.append({"type": "decision"})
    ledger.append({"type": "pull"})
    assert [r["type"] for r in _lines(ledger)] == ["header", "decision", "pull"]


def test_one_ledger_has_one_writer(ledger):
    """A second planner on the same folder is told so at its start."""
    ledger.append({"type": "pull"})
    other = Ledger(ledger.path)
    with pytest.raises(ConfigError, match="is held by another planner; stop it or choose another folder"):
        other.append({"type": "pull"})
    ledger.close()
    other.append({"type": "pull"})
    other.close()


def test_a_resumed_header_is_no_anchor(ledger):
    """The interval continues across it."""
    for record in ({"type": "header", "schema": 1, "resumed": False}, {"type": "pull"}):
        ledger.append(record)
    ledger.append({"type": "header", "schema": 1, "resumed": True})
    assert len(ledger.tail()) == 3


def test_the_tail_of_a_ledger_begins_with_its_last_anchor(ledger):
    """Lines come out whole and in their order."""
    ledger.append({"type": "decision", "id": "d000000"})
    ledger.append({"type": "decision", "id": "d000001"})
    for slot in range(20):
        ledger.append({"type": "pull", "slot": slot, "text": "x" * (slot * 17)})
    tail = ledger.tail()
    assert [r.get("slot") for r in tail] == [None, *range(20)]


def test_an_unreadable_ledger_is_set_aside_under_a_new_name(ledger):
    """Nothing is deleted, and an earlier one is not overwritten."""
    for number in (1, 2):
        ledger.append({"type": "pull"})
        assert ledger.set_aside().name == f"ledger.jsonl.unreadable-{number}"
    assert not ledger.path.exists()


# ---------------------------------------------------------------- rotation


async def test_a_long_ledger_goes_on_in_a_new_file_as_if_it_had_not(new_world):
    """Same decisions, ids and states; each file can be replayed, both as one, and the new one resumed."""
    from penstock_planner.explain import select
    from penstock_planner.replay import replay

    def build():
        world = new_world()
        world.load.kv = lambda now, _workers: 0.95 if now < 1060 else 0.1
        return world

    plain, rotating = build(), build()
    await plain.run_until(200)
    await plain.run_until(300)
    rotating.rotate_bytes = 20_000
    for end_s in (200, 300):
        await rotating.run_until(end_s)
    assert [d.id for d in rotating.watcher.decisions] == [d.id for d in plain.watcher.decisions]
    assert rotating.backend.calls == plain.backend.calls
    assert (rotating.folder / "ledger-1.jsonl").stat().st_size < 60_000
    older = read_ledger(rotating.folder / "ledger-1.jsonl")
    ledger = read_ledger(rotating.folder / "ledger.jsonl")
    assert len(ledger.records) > len(older.records) > 0
    for each in (older, ledger):
        assert each.records[0]["type"] == "header"
        assert replay(each).differences == ()
    kept = [r["decision"]["id"] for r in ledger.records if r["type"] == "decision"]
    assert kept == [decision.id for decision in plain.watcher.decisions][-len(kept) :]
    oldest = next(r["decision"]["id"] for r in older.records if r["type"] == "decision")
    assert select(ledger, last=1, decision_id=oldest)


def test_a_ledger_that_cannot_be_rotated_goes_on_as_it_is(tmp_path, monkeypatch):
    """Disk full, or no hard links on this file system."""
    from pathlib import Path

    def refuse(*_args):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "hardlink_to", refuse)
    ledger = Ledger(tmp_path / "ledger.jsonl", rotate_bytes=1)
    ledger.append({"type": "header", "schema": SCHEMA, "at_s": 1.0})
    assert ledger.is_long
    ledger.rotate({"type": "header", "schema": SCHEMA, "at_s": 2.0})
    ledger.append({"type": "pull", "at_s": 3.0})
    assert [r["at_s"] for r in read_ledger(tmp_path).records] == [1.0, 3.0]
    assert ledger.errors == 1
    ledger.close()


@pytest.mark.parametrize(
    "broken",
    [{"ready": [1]}, {"ready": "1"}, {"ready": None}, {"ready": 1, "gpus": {}}],
)
def test_a_record_of_other_kinds_of_values_is_refused_where_it_is_read(broken):
    """A list in place of a number would end in whatever computes with it first."""
    with pytest.raises(TypeError, match="is not of type int"):
        from_plain(Pull, {"at_s": 1.0, "pools": {"decode": broken}})
