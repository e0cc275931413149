"""Following a file that another process appends to."""

from penstock.local.ledger_tail import LineFollower


def test_each_line_is_given_once_and_a_torn_one_when_it_is_whole(tmp_path):
    """What is not ended yet waits for the next call."""
    path = tmp_path / "f"
    follower = LineFollower(path)
    assert follower.new_lines() == []
    path.write_bytes(b"a\nb\nc")
    assert follower.new_lines() == [b"a", b"b"]
    assert follower.new_lines() == []
    path.write_bytes(b"a\nb\ncd\n")
    assert follower.new_lines() == [b"cd"]


def test_a_file_that_shrank_is_a_new_one(tmp_path):
    """A ledger that was set aside for a new one is followed from its beginning."""
    path = tmp_path / "f"
    path.write_bytes(b"old\nold\n")
    follower = LineFollower(path)
    follower.new_lines()
    path.write_bytes(b"new\n")
    assert follower.new_lines() == [b"new"]
