"""The planner's ledger: an append-only file with one JSON object per line from which every decision can be explained and replayed.

Record types (key ``type``): ``header`` at each start, ``pull`` (a metrics scrape), ``decision`` (input, state before and after),
``actuation`` (outcome of a replica change) and ``settled`` (an adjustment has ended). A decision is on disk (fsync) before it is
carried out. A decision that changes nothing and is the same as the previous one is only counted; readers recompute it from the
pulls. Readers drop an incomplete last line, which a kill or a full disk leaves behind, and report the number of any other line that
cannot be read.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf
from pathlib import Path
from typing import Any, BinaryIO, Final

import orjson

from penstock.core.errors import ConfigError, LedgerError, LedgerFileError, PenstockError
from penstock.core.files import open_file
from penstock.core.logs import get_logger
from penstock_planner.core.following import LedgerFollower
from penstock_planner.core.older_names import with_present_names
from penstock_planner.core.records import ANCHORS, MALFORMED, READABLE_SCHEMAS, Record
from penstock_planner.decide.codec import from_plain
from penstock_planner.decide.config import DecideConfig
from penstock_planner.decide.decision import Decision
from penstock_planner.decide.demand.observation import Pull

FILE_NAME: Final = "ledger.jsonl"

OLDER_NAME: Final = "ledger-1.jsonl"
"""Name of the previous ledger file after a rotation; files before the previous one are deleted."""

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class LedgerFile:
    """Records read from a ledger, the planner's decision log.

    Attributes:
        records: Records in file order, those of the file before the last rotation first. Decisions that change nothing
            can be missing in the file; they are recomputed, and each follows the pull (metrics scrape) from which it
            was made.
        lines: Line number of each record, from 1, in its own file; for a recomputed decision, the line number of the
            pull from which it was made.
        notes: Sentences for people about lines that were left out because they are incomplete or cannot be read; empty
            if there are none.
    """

    records: tuple[Record, ...]
    lines: tuple[int, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FormerChange:
    """A decision of an earlier run of the planner that changed replicas.

    Attributes:
        decision: The decision.
        origin_s: Time at which the planner first started on the clock of that run, simulated seconds on this clock
            (whose zero has no meaning). The decision was made ``decision.at_s - origin_s`` after that start. Runs with
            equal ``origin_s`` are on the same clock (one boot of the host, and the same number of simulated seconds per
            real second); times of other runs cannot be compared.
        wall_s: Time at which the decision was recorded, real seconds since 1970; None in ledgers (decision logs) of an
            older version.
    """

    decision: Decision
    origin_s: float
    wall_s: float | None


@dataclass(frozen=True, slots=True)
class FormerRuns:
    """The records of earlier runs of the planner in a ledger (its decision log), without those of the present run.

    They are in the file before the last rotation, and in the current file up to a byte position.

    Attributes:
        path: Path of the current ledger file.
        end: Number of bytes of that file that belong to earlier runs.
    """

    path: Path
    end: int

    @classmethod
    def before_now(cls, folder: Path) -> FormerRuns:
        """Return a reference to the records that the ledger (decision log) in ``folder`` holds now.

        Records that are written later do not belong to it.
        """
        path = folder / FILE_NAME
        try:
            return cls(path, path.stat().st_size)
        except OSError:
            return cls(path, 0)

    def changes(self, newest: int) -> list[FormerChange]:
        """Return the newest decisions of earlier runs that changed replicas, oldest first. Unreadable lines are left out.

        Args:
            newest: Maximum number of decisions to return.
        """
        found = (_change_of(line) for line in self._lines())
        return list(islice((each for each in found if each is not None), newest))[::-1]

    def pulls(self, origin_s: float, gap_s: Callable[[float], float]) -> list[Pull]:
        """Return metrics scrapes of earlier runs, thinned out so that they are at least a given time apart, oldest first.

        Reading goes backwards from the newest record, and ends at the first run whose recorded ``origin_s`` differs,
        since times of another clock cannot be compared.

        Args:
            origin_s: Time at which the planner first started on the clock of the present run, in simulated seconds. All
                runs on this clock have recorded it, so that it identifies them.
            gap_s: Function that returns the minimum simulated seconds between a scrape and the one before it. Its
                argument is the age of the later one relative to the newest record, in simulated seconds. It returns
                infinity to end the reading.
        """
        found: list[Pull] = []
        accepted, newest_s, due_s = 0, None, inf
        for line in self._lines():
            if line.startswith(_HEADER):
                if _origin_of(line) != origin_s:
                    break
                accepted = len(found)
                if due_s == -inf:
                    break
            at = _PULL.match(line)
            if at is None:
                continue
            at_s = float(at[1])
            newest_s = at_s if newest_s is None else newest_s
            if at_s > due_s:
                continue
            pull = _pull_of(line)
            if pull is not None:
                found.append(pull)
            due_s = at_s - gap_s(newest_s - at_s)
        return found[:accepted][::-1]

    def _lines(self) -> Iterator[bytes]:
        """Yield the lines, the newest first, as far as they can be read."""
        for path, end in ((self.path, self.end), (self.path.with_name(OLDER_NAME), None)):
            try:
                with open_file(path) as file:
                    size = os.fstat(file.fileno()).st_size
                    yield from _lines_backward(file.fileno(), size if end is None else min(end, size))
            except OSError:
                continue


def _origin_of(line: bytes) -> float | None:
    """Return the origin of the timeline in a header line; None if it cannot be read."""
    try:
        return float(orjson.loads(line)["origin_s"])
    except MALFORMED:
        return None


def _pull_of(line: bytes) -> Pull | None:
    try:
        return from_plain(Pull, with_present_names(orjson.loads(line))["pull"], skips_unknown=True)
    except (*MALFORMED, PenstockError):
        return None


def _change_of(line: bytes) -> FormerChange | None:
    """Return the change that a line records; None if it records no change or cannot be read."""
    if not line.startswith(_DECISION):
        return None
    try:
        record = with_present_names(orjson.loads(line))
        decision = from_plain(Decision, record["decision"], skips_unknown=True)
        wall_s = record.get("wall_s")
        change = FormerChange(decision, float(record["origin_s"]), None if wall_s is None else float(wall_s))
    except (*MALFORMED, PenstockError):
        return None
    return change if decision.changes else None


_DECISION: Final = b'{"type":"decision"'
_HEADER: Final = b'{"type":"header"'
_PULL: Final = re.compile(rb'\{"type":"pull","at_s":([-0-9.e+]+),')
"""Prefixes of records, since most lines are not needed and parsing them all would take seconds."""


def read_ledger(path: Path, *, newest: int | None = None) -> LedgerFile:
    """Return all records of a ledger (the planner's decision log), including those of the file before its last rotation.

    Args:
        path: Path of the ledger file, or of the folder that contains ``ledger.jsonl``.
        newest: Number of newest decisions that the caller needs. Decisions that change nothing can be missing in the
            file and are recomputed, which takes half a millisecond each; older ones may then be left out. None
            recomputes all.

    Raises:
        LedgerError: the file does not exist, has an unknown schema, or has an unreadable line other than the last one.
    """
    if path.is_dir():
        path /= FILE_NAME
    records: list[Record] = []
    notes: list[str] = []
    with contextlib.ExitStack() as files:
        for each, file in _opened(path, files):
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    notes.append(f"{each}:{number}: torn last line of {len(line)} bytes dropped")
                    break
                records.append(_parse(line, each, number))
    found = _completed(records, 0 if newest is None else _anchor_before(records, newest))
    return LedgerFile(
        tuple(record for _, record in found), tuple(number for number, _ in found), tuple(notes)
    )


def _opened(path: Path, files: contextlib.ExitStack) -> list[tuple[Path, BinaryIO]]:
    """Return the open files of a ledger, the one before the last rotation first.

    The newer file is opened first. If a rotation happens between the two opens, both are the same file, and it is read only once.
    """
    try:
        found: list[tuple[Path, BinaryIO]] = [(path, files.enter_context(open_file(path)))]
        older = path.with_name(OLDER_NAME)
        if path.name == FILE_NAME and older.exists():
            file = files.enter_context(open_file(older))
            if not os.path.samestat(os.fstat(file.fileno()), os.fstat(found[0][1].fileno())):
                found.insert(0, (older, file))
    except OSError as exc:
        raise LedgerFileError(
            f"{path}: cannot be read: {exc.strerror}; give the planner's --log-dir"
        ) from exc
    return found


def _anchor_before(records: Sequence[Record], decisions: int) -> int:
    """Return the index of an anchor record with at least that many decisions after it; 0 if there is none."""
    for index in range(len(records) - 1, -1, -1):
        record = records[index]
        # A resumed header is in the middle of an interval, so it is not an anchor.
        if decisions <= 0 and record["type"] in ANCHORS and not record.get("resumed", False):
            return index
        if record["type"] == "decision":
            decisions -= 1 + record.get("held", 0)
    return 0


def _completed(records: Sequence[Record], first: int) -> list[tuple[int, Record]]:
    """Return the records with their line numbers, with the decisions that are only counted recomputed and inserted."""
    found: list[tuple[int, Record]] = []
    made: list[int] = []
    follower = LedgerFollower(DecideConfig())
    for number, record in enumerate(records, start=1):
        if record["type"] in ANCHORS:
            # Recomputed decisions after the last one that the ledger counts have their own records or were never made.
            last = (record.get("before") or record.get("state") or {}).get("sequence", 0)
            for index in reversed(made):
                if found[index][1]["state"]["sequence"] > last:
                    del found[index]
            made = []
        found.append((number, record))
        if number <= first and record["type"] == "pull":
            continue
        try:
            held = follower.follow(record)
        except (*MALFORMED, PenstockError):
            # The reader of the record reports the error; nothing can be recomputed before the next header.
            follower = LedgerFollower(DecideConfig())
            continue
        if held is not None:
            made.append(len(found))
            found.append((number, orjson.loads(_line(held))))
    return found


def _is_text(line: bytes) -> bool:
    try:
        line.decode()
    except UnicodeDecodeError:
        return False
    return True


def _parse(line: bytes, path: Path, number: int) -> Record:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as exc:
        remedy = (
            "this is not a ledger; give the planner's --log-dir, or its ledger.jsonl"
            if number == 1
            else "restore the line from a backup or delete it"
        )
        what = f"not JSON ({exc})" if _is_text(line) else "not text"
        raise LedgerFileError(f"{path}:{number}: {what}; {remedy}") from exc
    if not isinstance(record, dict) or "type" not in record:
        raise LedgerFileError(
            f"{path}:{number}: not a ledger record; restore the line from a backup or delete it"
        )
    if record["type"] == "header" and record.get("schema") not in READABLE_SCHEMAS:
        known = " and ".join(map(str, sorted(READABLE_SCHEMAS)))
        raise LedgerFileError(
            f"{path}:{number}: schema {record.get('schema')!r}, this version reads {known}; use the version that wrote it"
        )
    renamed: Record = with_present_names(record)
    return renamed


class Ledger:
    """The writer of a ledger (decision log) file; only one process can have it open, since the file is locked.

    The file is opened at the first record. A failed open or write is retried with the next record, so a full or
    read-only disk prevents decisions without ending the process.

    Attributes:
        path: Path of the file.
        errors: Number of records that could not be written.
        problem: Error of the newest record; empty if that record was written.
    """

    def __init__(self, path: Path, *, rotate_bytes: int | None = None) -> None:
        """Prepare to write; the file is opened and locked with the first record.

        Args:
            path: Path of the ledger file.
            rotate_bytes: Size from which `is_long` is True; None for no limit.
        """
        self.path = path
        self._rotate_bytes = rotate_bytes
        self.errors = 0
        self.problem = ""
        self._header: bytes | None = None
        self._descriptor: int | None = None
        self._end = 0
        self._is_failing = False

    def append(self, record: Mapping[str, Any], *, durable: bool = False) -> None:
        """Append one record to the ledger (the planner's decision log).

        Args:
            record: Values by name: plain values, dataclasses or enums.
            durable: Whether to return only after the record is on disk (fsync).

        Raises:
            LedgerError: the record could not be written. The file then ends with the record before it.
            ConfigError: another planner has locked the file.
        """
        try:
            line = _line(record)
            self._write(self._open(), (self._header or b"") + line, durable=durable)
        except OSError as exc:
            self.errors += 1
            self.problem = (
                f"{self.path}: cannot be written: {os.strerror(exc.errno or 0)}; free or repair the disk"
            )
            raise LedgerError(self.problem) from exc
        self.problem = ""
        self._header = None
        self._is_failing = False

    def begin(self, header: Mapping[str, Any]) -> None:
        """Write the header record of this run to the ledger (the planner's decision log).

        If that fails, the header is written together with the next record that can be written.
        """
        self._header = None
        self.try_append(header)
        if self._is_failing:
            self._header = _line(header)

    def try_append(self, record: Mapping[str, Any]) -> None:
        """Write a record that may be lost without harm to the ledger (the planner's decision log).

        A failure is not raised, and only the first of several in a row is logged.
        """
        try:
            self.append(record)
        except LedgerError as exc:
            if not self._is_failing:
                log.warning("ledger not written", error=str(exc))
            self._is_failing = True

    def tail(self) -> list[Record]:
        """Return the records of the ledger (the planner's decision log) from the last anchor on, in file order.

        Returns an empty list if there is no file or no anchor.

        An anchor is a record from which the planner's state can be restored; the header of a resumed run is not one. An
        incomplete last line is removed from the file.

        Raises:
            LedgerError: a line after the anchor cannot be read; the message gives its number.
            ConfigError: another planner has locked the file.
        """
        try:
            descriptor = self._open()
            found: list[Record] = []
            for line in _lines_backward(descriptor, self._end):
                record = self._parse_backward(line, descriptor, len(found))
                found.append(record)
                if record["type"] in ANCHORS and not record.get("resumed", False):
                    return found[::-1]
        except OSError as exc:
            log.warning("ledger not read", path=str(self.path), error=exc.strerror)
        return []

    def _parse_backward(self, line: bytes, descriptor: int, from_last: int) -> Record:
        try:
            return _parse(line, self.path, 0)
        except LedgerError:
            # Counting lines reads the entire file, so it is done only for an error message.
            lines = sum(1 for _ in _lines_backward(descriptor, self._end))
            return _parse(line, self.path, lines - from_last)

    @property
    def is_long(self) -> bool:
        """Whether the file has reached its size limit, so that a new file should be started with `rotate`."""
        return self._rotate_bytes is not None and self._end >= self._rotate_bytes

    def rotate(self, header: Mapping[str, Any]) -> None:
        """Continue the ledger (the planner's decision log) in a new file that starts with ``header``, and keep the present one.

        The present file is renamed to ``ledger-1.jsonl`` (`OLDER_NAME`). A complete ledger exists at every instant. A
        failure is logged and changes nothing.
        """
        fresh, older = self.path.with_name(f"{self.path.name}.new"), self.path.with_name(OLDER_NAME)
        try:
            with fresh.open("wb") as file:
                file.write(_line(header))
                file.flush()
                os.fsync(file.fileno())
            older.unlink(missing_ok=True)
            older.hardlink_to(self.path)
            self.close()
            self._end = 0
            fresh.replace(self.path)
        except OSError as exc:
            self.errors += 1
            log.warning("ledger not rotated", path=str(self.path), error=exc.strerror)

    def set_aside(self) -> Path:
        """Rename a ledger (decision log) that cannot be read, so that a new one can be started; return its new path."""
        self.close()
        number = 1
        while (aside := self.path.with_name(f"{self.path.name}.unreadable-{number}")).exists():
            number += 1
        self.path.rename(aside)
        return aside

    def close(self) -> None:
        """Unlock and close the file of the ledger (decision log); does nothing if it is not open."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> int:
        if self._descriptor is not None:
            return self._descriptor
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            size = os.fstat(descriptor).st_size
            self._end = _end_of_last_line(descriptor, size)
            if self._end < size:
                log.warning(
                    "torn last line of the ledger dropped", path=str(self.path), bytes=size - self._end
                )
                os.ftruncate(descriptor, self._end)
        except BlockingIOError as exc:
            os.close(descriptor)
            raise ConfigError(
                f"--log-dir: {self.path} is held by another planner; stop it or choose another folder"
            ) from exc
        except OSError:
            os.close(descriptor)
            raise
        self._descriptor = descriptor
        return descriptor

    def _write(self, descriptor: int, line: bytes, *, durable: bool) -> None:
        try:
            if os.fstat(descriptor).st_size != self._end:
                os.ftruncate(descriptor, self._end)
            position = self._end
            view = memoryview(line)
            while view:
                written = os.pwrite(descriptor, view, position)
                position += written
                view = view[written:]
            if durable:
                os.fsync(descriptor)
        except OSError as exc:
            # Bytes after the last complete record are removed now or, if that fails, before the next write.
            if exc.errno != errno.EROFS:
                _cut(descriptor, self._end)
            raise
        self._end = position


def _line(record: Mapping[str, Any]) -> bytes:
    # Roles are keys of mappings; without this option orjson accepts only exact strings as keys.
    return orjson.dumps(record, option=orjson.OPT_NON_STR_KEYS) + b"\n"


def _cut(descriptor: int, end: int) -> None:
    try:
        os.ftruncate(descriptor, end)
    except OSError as exc:
        log.debug("ledger tail not cut", error=exc.strerror)


def _end_of_last_line(descriptor: int, size: int) -> int:
    if not size:
        return 0
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as data:
        return data.rfind(b"\n") + 1


def _lines_backward(descriptor: int, end: int) -> Iterator[bytes]:
    if not end:
        return
    with mmap.mmap(descriptor, end, prot=mmap.PROT_READ) as data:
        while end > 0:
            start = data.rfind(b"\n", 0, end - 1) + 1
            yield data[start:end]
            end = start
