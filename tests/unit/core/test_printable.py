"""Text of files and peers moves no cursor."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.main import main
from penstock.core.printable import printable


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
    assert r"there is \x1b[2J to" in capsys.readouterr().err
