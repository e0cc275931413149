"""Files that a user names: a pipe is read to its end, and one that nobody writes is not waited for."""

import os

import pytest

from penstock.core.files import open_file, read_bytes


@pytest.fixture
def fifo(tmp_path):
    """Return the path of a FIFO."""
    path = tmp_path / "fifo"
    os.mkfifo(path)
    return path


def test_a_file_is_read_as_any(tmp_path):
    """Line by line, too."""
    path = tmp_path / "x"
    path.write_bytes(b"one\ntwo\n")
    assert read_bytes(path) == b"one\ntwo\n"
    with open_file(path) as file:
        assert list(file) == [b"one\n", b"two\n"]


def test_a_pipe_that_nobody_writes_is_refused(fifo):
    """A named one without a writer, and one whose writer is silent."""
    with pytest.raises(TimeoutError, match="nothing came for 0 s"):
        open_file(fifo, patience_s=0.0)
    reader, writer = os.pipe()
    with pytest.raises(TimeoutError, match="nothing came for 0 s"):
        open_file(f"/dev/fd/{reader}", patience_s=0.0)
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize("content", [b"", b"x" * 5000])
def test_a_shells_pipe_is_read_to_its_end(content):
    """`penstock validate <(command)`, also of a command that prints nothing."""
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    assert read_bytes(f"/dev/fd/{reader}") == content
    os.close(reader)


def test_a_folder_is_no_file(tmp_path):
    """As `open` says it."""
    with pytest.raises(IsADirectoryError):
        open_file(tmp_path)
