"""From an entry to a process: ports, arguments, environment."""

import socket

import pytest

from penstock.local.build import argv_of, environment_of, ports_for, visible_devices
from penstock.local.ports import FIRST_PORT, LAST_PORT, choose_port, ephemeral_port, is_free


@pytest.fixture
def listening():
    """Yield a port that somebody listens on."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(1)
        yield server.getsockname()[1]


def test_a_port_that_is_listened_on_is_not_free(listening):
    """`penstock up` notices it before anything is started."""
    assert not is_free(listening)
    assert is_free(ephemeral_port())


def test_chosen_ports_lie_in_the_worker_range_and_are_not_promised_twice():
    """Promised ports count as taken although nobody listens yet."""
    first = choose_port([])
    second = choose_port([first])
    assert FIRST_PORT <= first <= LAST_PORT
    assert first != second


def test_a_worker_keeps_its_port_unless_somebody_took_it(entry_of, listening):
    """A restart is at the same address where that is possible; the router's address never changes."""
    free = ephemeral_port()
    kept = entry_of(placeholders=("port",), ports={"port": free})
    lost = entry_of(placeholders=("port",), ports={"port": listening})
    router = entry_of("frontend", "router", placeholders=("port",), ports={"port": listening})
    assert ports_for(kept, [kept]) == {"port": free}
    assert ports_for(lost, [lost])["port"] != listening
    assert ports_for(router, [router]) == {"port": listening}


def test_placeholders_are_filled_and_other_braces_stay(entry_of):
    """Arguments hold JSON."""
    entry = entry_of(cmd=("x", "--port", "{port}", '{"kv": {"port": 1}}'), ports={"port": 21000})
    assert argv_of(entry) == ["x", "--port", "21000", '{"kv": {"port": 1}}']


def test_a_worker_sees_its_gpus_only_and_carries_the_mark(entry_of):
    """CUDA_VISIBLE_DEVICES is set for every worker, empty for one without GPUs, and for nobody else."""
    worker = entry_of(gpus=(2, 3), env={"SIDE": "{port}"}, ports={"port": 5})
    assert environment_of(worker, "/s.json", {}) == {
        "SIDE": "5",
        "CUDA_VISIBLE_DEVICES": "2,3",
        "PENSTOCK_STATEFILE": "/s.json",
    }
    assert environment_of(entry_of(gpus=()), "/s.json", {})["CUDA_VISIBLE_DEVICES"] == ""
    assert "CUDA_VISIBLE_DEVICES" not in environment_of(entry_of("frontend", "router"), "/s.json", {})


@pytest.mark.parametrize(
    ("gpus", "inherited", "expected"),
    [((0, 1), None, "0,1"), ((0, 1), "4, 6", "4,6"), ((1,), "GPU-a,GPU-b", "GPU-b"), ((2,), "4", "2")],
)
def test_ids_count_the_devices_that_the_arbiter_sees(gpus, inherited, expected):
    """An inherited list is indexed, so two graphs on one host can share it out."""
    assert visible_devices(gpus, inherited) == expected
