"""The first second of `penstock up`, before its graph's name is known."""

import os
import threading

from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.local import start_marker
from penstock.local.down import await_start
from penstock.local.start_marker import StartMarker
from penstock.local.starts import starting

BEGIN = """
from penstock.local.start_marker import StartMarker
held = StartMarker()
print("there", flush=True)
input()
"""


def test_down_waits_for_an_up_that_has_not_named_its_graph_yet(spawn, state_folder):
    """Until it is recorded; of other graphs it waits on, until that `up` is past its beginning."""
    up = spawn(BEGIN)
    assert up.stdout.readline() == b"there\n"
    looks = []

    def until():
        looks.append(len(looks))
        if len(looks) == 3:
            up.stdin.close()
            up.wait()
        return False

    start_marker.wait(until)
    assert len(looks) >= 3
    with starting(["tiny"]):
        held = StartMarker()
        await_start(None)  # returns at once: the start is known
        await_start("tiny")
        waiting = threading.Thread(target=await_start, args=("other",))
        waiting.start()
        assert waiting.is_alive()
        held.close()
        waiting.join()


def test_an_up_that_ended_or_was_killed_is_not_waited_for(spawn, state_folder):
    """The kernel lets go of its lock, and no file is left."""
    up = spawn(BEGIN)
    assert up.stdout.readline() == b"there\n"
    up.kill()
    up.wait()
    start_marker.wait(lambda: False)
    assert list(state_folder.iterdir()) == []


def test_down_finds_no_beginning_without_a_state_folder(state_folder):
    """And makes none."""
    state_folder.rmdir()
    await_start(None)
    assert not state_folder.exists()


def test_the_command_line_begins_before_it_imports_up(state_folder, monkeypatch, tmp_path):
    """Whatever it then refuses, it has let go at its end."""
    held = []
    real = start_marker.StartMarker.__init__

    def begin(self):
        real(self)
        held.append(start_marker._one_begins())

    monkeypatch.setattr(start_marker.StartMarker, "__init__", begin)
    missing = tmp_path / "none.yaml"
    assert CliRunner().invoke(cli, ["up", os.fspath(missing)]).exit_code != 0
    assert held == [True]
    assert not start_marker._one_begins()
