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
    assert last_lines(path, start, only_errors=True) == ""


@pytest.mark.parametrize("raised", ["Exception: no model", "a.b.HfError: no model", "AssertionError"])
@pytest.mark.parametrize(
    "before", ["", "(EngineCore pid=7) ", "(EngineCore pid=7) ERROR 11-27 06:25:03 [core.py:842] "]
)
def test_the_exception_is_quoted_though_other_threads_log_on(tmp_path, raised, before):
    """Three lines of noise after a traceback would hide why the process ended; colours are left out."""
    path = tmp_path / "x.log"
    path.write_text(f"Traceback\n  in f\n{before}{raised}\n\x1b[2mone\x1b[0m\ntwo\nthree\n")
    assert last_lines(path) == f"{raised} | two | three"
    path.write_text(f"one\n{before}{raised}\ntwo\n")
    assert last_lines(path) == f"{raised} | two"


VLLM = """\
(APIServer pid=1) INFO 11-27 06:24:01 [api_server.py:1] Model loaded
(APIServer pid=1) ValueError: a request of an hour ago
{served}
(EngineCore pid=7) ERROR 11-27 06:25:03 [core.py:842] EngineCore failed to start.
(EngineCore pid=7) ERROR 11-27 06:25:03 [core.py:842] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-27 06:25:03 [core.py:842]   File "core.py", line 833, in run_engine_core
(EngineCore pid=7) ERROR 11-27 06:25:03 [core.py:842] ImportError: libcudart.so.13: cannot open shared object file
(EngineCore pid=7) Process EngineCore:
(EngineCore pid=7) Traceback (most recent call last):
(EngineCore pid=7)   File "core.py", line 846, in run_engine_core
(EngineCore pid=7)     raise e
(EngineCore pid=7) ImportError: libcudart.so.13: cannot open shared object file
(APIServer pid=1) Traceback (most recent call last):
{deep}
(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {{}}
/usr/lib/python3.12/multiprocessing/resource_tracker.py:279: UserWarning: resource_tracker: There appear to be 1 leaked \
shared_memory objects to clean up at shutdown
  warnings.warn('resource_tracker: There appear to be %d '
"""


def test_of_an_engine_that_dies_its_first_and_last_error_are_quoted(tmp_path):
    """The cause stands some pages above what the server makes of it; Python's trackers speak last of all."""
    served = "\n".join(f"(APIServer pid=1) INFO served {number}" for number in range(20))
    deep = "\n".join(f'(APIServer pid=1)   File "deep.py", line {line}, in call' for line in range(200))
    path = tmp_path / "x.log"
    path.write_text(VLLM.format(served=served, deep=deep))
    assert last_lines(path) == (
        "ImportError: libcudart.so.13: cannot open shared object file | "
        "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}"
    )
    assert last_lines(path, only_errors=True) == last_lines(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, no such repository\n",
            "pydantic_core.ValidationError: 1 validation error for ModelConfig: Value error, no such repository",
        ),
        (
            "usage: vllm serve\nvllm serve: error: unrecognized arguments: --x\n",
            "vllm serve: error: unrecognized arguments: --x",
        ),
        (
            "terminate called after throwing an instance of 'c10::Error'\n  what():  CUDA error: no device\nmore\n",
            "what():  CUDA error: no device | more",
        ),
        ("Fatal Python error: Segmentation fault\n\n", "Fatal Python error: Segmentation fault"),
    ],
)
def test_ends_that_are_no_traceback_are_quoted_too(tmp_path, text, reason):
    """Refused settings and flags, an abort, a crash of the interpreter."""
    path = tmp_path / "x.log"
    path.write_text(text)
    assert last_lines(path) == reason


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
