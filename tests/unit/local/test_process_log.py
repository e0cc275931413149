"""Logs: bounded, and quoted for reasons."""

import pytest

from penstock.local.process_log import bound, last_lines, log_path, size_of


def test_the_last_lines_of_this_run_are_quoted(tmp_path):
    """Words of an earlier run are not mistaken for this one's."""
    path = log_path(str(tmp_path), "n_decode")
    path.write_text("old trouble\n")
    start = size_of(path)
    assert last_lines(path, start) == ""
    with path.open("a") as file:
        file.write("one\n\ntwo\nthree\nfour\n")
    assert last_lines(path, start) == "two | three | four"
    assert last_lines(path, start, lines=1) == "four"


@pytest.mark.parametrize(
    "raised", ["Exception: no model", "(EngineCore pid=7) ValueError: no model", "a.b.HfError: no model"]
)
def test_the_exception_is_quoted_though_other_threads_log_on(tmp_path, raised):
    """Three lines of noise after a traceback would hide why the process ended; colours are left out."""
    path = tmp_path / "x.log"
    path.write_text(f"Traceback\n  in f\n{raised}\n\x1b[2mone\x1b[0m\ntwo\nthree\n")
    assert last_lines(path) == f"{raised} | two | three"
    path.write_text(f"one\n{raised}\ntwo\n")
    assert last_lines(path) == f"one | {raised} | two"


def test_long_lines_and_missing_files_are_harmless(tmp_path):
    """A reason stays readable."""
    path = tmp_path / "x.log"
    assert last_lines(path) == ""
    path.write_bytes(b"\xff" * 10 + b"y" * 3000 + b"\n")
    assert len(last_lines(path)) == 240


def test_a_log_beyond_its_bound_moves_to_one_older_generation(tmp_path):
    """The writer's descriptor stays valid and writes on at the begin."""
    path = tmp_path / "x.log"
    with path.open("ab", buffering=0) as writer:
        writer.write(b"a" * 100)
        assert not bound(path, max_bytes=100)
        writer.write(b"b")
        assert bound(path, max_bytes=100)
        writer.write(b"c")
    assert path.read_bytes() == b"c"
    assert (tmp_path / "x.log.1").read_bytes() == b"a" * 100 + b"b"
