"""The exception tree and the structured logs."""

import errno
import json
import logging
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.main import main
from penstock.core import errors, logs
from penstock.core.errors import unwritable
from penstock.core.printable import printable


def test_an_invalid_spec_prints_each_problem_with_file_and_line():
    """All problems at once, one line each."""
    error = errors.InvalidSpecError(
        [
            errors.ManifestProblem("spec.a", "1 must be below 1", file="g.yaml", line=3),
            errors.ManifestProblem("", "is empty"),
        ]
    )

    assert str(error) == "g.yaml:3: spec.a: 1 must be below 1\nmanifest: is empty"


@pytest.fixture
def stderr(capsys):
    """Reads what went to stderr, and restores the root logger that `configure` takes over."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield lambda: capsys.readouterr().err
    root.handlers[:], root.level = handlers, level


def test_json_logs_hold_event_and_bound_keys(stderr):
    """A log line is one JSON object whose event text is constant."""
    logs.configure("info", as_json=True)

    logs.get_logger("penstock.test").info("worker ready", worker="w", port=1)

    line = json.loads(stderr())
    assert (line["event"], line["worker"], line["port"], line["level"]) == ("worker ready", "w", 1, "info")


def test_an_exception_carries_its_traceback(stderr):
    """Task roots log what went wrong, with the cause."""
    logs.configure("info", as_json=True)

    try:
        raise ValueError("boom")
    except ValueError:
        logs.get_logger("penstock.test").exception("task failed")

    assert "ValueError: boom" in json.loads(stderr())["exception"]


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.ENOSPC, "free some space"),
        (errno.EDQUOT, "free some space"),
        (errno.ENOTDIR, "one of its parents is a file; choose another folder"),
        (errno.EEXIST, "a file of this name exists; choose another folder"),
        (errno.EACCES, "choose a folder that you may write to"),
        (errno.EROFS, "choose a folder that you may write to"),
    ],
)
def test_the_remedy_of_an_unwritable_folder_fits_its_reason(number, remedy):
    """Only a full disk is to be freed; a file in the way, or a missing right, asks for another folder."""
    message = unwritable("--output-dir /x", OSError(number, os.strerror(number)))
    assert message == f"--output-dir /x: cannot be written to: {os.strerror(number)}; {remedy}"


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ("plain text, grün, 3 > 2", "plain text, grün, 3 > 2"),
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\r\nb\tc", r"a\r\nb\tc"),
        ("\x9b2J", r"\x9b2J"),
        ("abc\u202etxt", r"abc\u202etxt"),
        ({"\x00": ["\x7f", 1, None, True]}, {r"\x00": [r"\x7f", 1, None, True]}),
    ],
)
def test_control_characters_are_shown_by_their_escapes(given, shown):
    """In strings and keys at every depth; numbers stay what they are."""
    assert printable(given) == shown


@given(st.text())
def test_what_is_printable_stays(text):
    """Text without control characters is the same, and a second pass changes nothing."""
    assert printable(printable(text)) == printable(text)
    assert not any(ord(each) < 32 or 127 <= ord(each) < 160 for each in printable(text))


def test_an_error_shows_what_it_quotes(tmp_path, capsys):
    """An error message may quote a file; its lines stay lines."""
    (tmp_path / "ledger.jsonl").write_text('{"type":"decision","decision":{"id":"\\u001b[2J"},"config":{}}\n')
    with pytest.raises(SystemExit):
        main(["planner", "explain", "--log-dir", str(tmp_path), "--id", "x"])
    assert r"the ledger holds \x1b[2J to" in capsys.readouterr().err
