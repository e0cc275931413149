"""Ports that are taken, and workers that cannot start, as the processes show them."""

import json
import socket

import pytest
from patience import LIMIT_S

TAKEN = [
    (("router", "serve", "--model", "m", "--worker", "decode=http://127.0.0.1:9", "--worker",
      "prefill=http://127.0.0.1:9", "--port", "TAKEN"), ["port TAKEN", "in use", "--port"]),
    (("engine", "serve", "m", "--port", "TAKEN"), ["port TAKEN", "in use", "--port"]),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), TAKEN, ids=lambda value: " ".join(value[:2]))
def test_a_taken_port_is_refused_without_a_traceback(world, arguments, words):
    """Exit 2 and one message on stderr."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        done = world.run(*(argument.replace("TAKEN", port) for argument in arguments))
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("penstock: ") == 1, done.stderr
    assert [word for word in words if word.replace("TAKEN", port) not in done.stderr] == []


def test_a_worker_that_dies_at_start_is_shown_restarted_and_given_up_with_its_words(world, eventually):
    """`status` shows the reason while it is tried again with a backoff; then `up` says it and leaves nothing."""
    manifest = world.manifest()
    manifest.write_text(
        manifest.read_text().replace("role: decode,", "role: decode, args: [--block-size, '0'],")
    )
    flags = ("--speed", 10, "--port", world.port, "--log-dir", world.log_dir)
    process = world.start("up", manifest, *flags, name="up")
    restarted = eventually(
        lambda: (entry := world.state().get("world_decode", {})).get("restarts", 0) >= 1 and entry,
        "restart",
    )
    assert "--block-size': 0 is not in the range x>=1" in restarted["reason"]
    shown = json.loads(world.run("status", "--json").stdout)
    decode = next(each for each in shown["processes"] if each["name"] == "world_decode")
    assert "exit code 2" in decode["reason"]
    assert decode["state"] == "starting"
    assert process.wait(LIMIT_S) == 1
    words = (world.folder / "up.out").read_text()
    for word in (
        "decode: gave up after 5 failures",
        "--block-size': 0 is not in the range x>=1",
        "everything was stopped",
    ):
        assert word in words
    assert "Traceback" not in words
    assert world.marked() == {}
    assert not world.statefile.exists()
