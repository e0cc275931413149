"""Thresholds of a graph: a change at one router reaches all, in any order, and the file's change counts once."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.api import RouterConfig
from penstock.router.admission import Admission
from penstock.router.core.build import SPLIT, build_router
from penstock.router.policy.busy import NO_THRESHOLDS, BusyThresholds
from penstock.router.thresholds import GraphThresholds


def routers(count):
    """Routers of one graph that have just started."""
    cores = [build_router(RouterConfig(), SPLIT) for _ in range(count)]
    return [GraphThresholds(Admission(core, lambda: 0.0)) for core in cores]


def exchange(all_routers):
    """Tell every router what every other one has."""
    for each in all_routers:
        for other in all_routers:
            each.received(other.state.published())


VALUES = st.builds(BusyThresholds, st.sampled_from([None, 0.5, 0.9]))
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("set"), st.integers(0, 2), VALUES),
        st.tuples(st.just("file"), st.integers(0, 2), VALUES),
        st.tuples(st.just("received"), st.integers(0, 2), st.integers(0, 2)),
    ),
    max_size=12,
)


@given(STEPS)
def test_routers_agree_after_any_changes(steps):
    """Made at several of them at once, heard in part, in any order: one round later all hold the same, and apply it."""
    all_routers = routers(3)
    for what, at, value in steps:
        router = all_routers[at]
        if what == "set":
            router.set(value)
            assert router.now == value
        elif what == "file":
            router.file_changed(value)
        else:
            router.received(all_routers[value].state.published())
    exchange(all_routers)

    assert len({each.state for each in all_routers}) == 1
    for each in all_routers:
        assert {busy.thresholds for busy in each._admission.core.busy.values()} == {each.now}


def test_a_file_that_another_router_has_read_before_takes_nothing_back():
    """A kubelet brings it to the second router a minute later; what was set meanwhile stays until the next change."""
    one, two = routers(2)
    file, own = BusyThresholds(0.85, 100_000), BusyThresholds(0.5)
    one.file_changed(file)
    exchange([one, two])
    one.set(own)
    exchange([one, two])

    two.file_changed(file)
    assert (one.now, two.now) == (own, own)

    two.file_changed(NO_THRESHOLDS)
    exchange([one, two])
    assert (one.now, two.now) == (NO_THRESHOLDS, NO_THRESHOLDS)
