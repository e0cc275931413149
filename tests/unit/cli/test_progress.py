"""How long commands show that they are alive."""

import io
import sys
import threading

import pytest

from penstock.cli import progress
from penstock.cli.progress import counting, working
from penstock.cli.terminal import Terminal


class _Stderr(io.StringIO):
    """Says when a text has come."""

    def __init__(self, awaited):
        super().__init__()
        self._awaited, self.has_come = awaited, threading.Event()

    def write(self, text):
        written = super().write(text)
        if self._awaited in self.getvalue():
            self.has_come.set()
        return written


@pytest.fixture
def stderr(monkeypatch):
    """Return a way to put a stderr that is not a terminal in place, with frequent lines."""
    monkeypatch.setattr(progress, "LINE_EVERY_S", 0.001)

    def put(awaited):
        monkeypatch.setattr(sys, "stderr", _Stderr(awaited))
        return sys.stderr

    return put


def test_without_a_terminal_lines_say_how_much_is_done(stderr):
    """A line comes while the work continues, nobody moving the count meanwhile, and none after its end."""
    heard = stderr("3 of 8 runs done (")
    with counting("runs", 8) as show:
        show(3)
        assert heard.has_come.wait(60)
    assert all(each.name != "progress" for each in threading.enumerate())


def test_without_a_terminal_the_work_is_named_at_once_and_again(stderr):
    """The first line does not wait, later ones hold the newest words."""
    heard = stderr("starting demo: prefill-0 loads (")
    with working("starting demo", Terminal(stderr=True)) as show:
        assert heard.getvalue().startswith("starting demo\n")
        show("starting demo: prefill-0 loads")
        assert heard.has_come.wait(60)


def test_work_that_fails_ends_its_lines(stderr):
    """The error passes, the thread does not stay."""
    stderr("")
    with pytest.raises(ValueError, match="lost"), counting("runs", 2):
        raise ValueError("lost")
    assert all(each.name != "progress" for each in threading.enumerate())


def test_a_quiet_command_says_nothing(stderr):
    """As --json promises."""
    heard = stderr("anything")
    with counting("runs", 2, is_quiet=True) as show:
        show(1)
    assert heard.getvalue() == ""
