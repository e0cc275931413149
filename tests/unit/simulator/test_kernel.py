"""Virtual time: a total order, and no way back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.simulator.kernel import Kernel, Order


def drain(kernel):
    """Run everything."""
    while kernel.step():
        pass


@pytest.mark.parametrize("time_s", [0.9, float("nan")])
def test_the_past_is_refused(time_s):
    """Neither a past time nor a number that is none can be scheduled."""
    kernel = Kernel()
    kernel.at(1.0, Order.MESSAGE, lambda: None)
    kernel.step()

    with pytest.raises(ValueError, match="cannot schedule"):
        kernel.at(time_s, Order.MESSAGE, lambda: None)


@given(st.lists(st.tuples(st.sampled_from([0.0, 1.0, 2.0]), st.sampled_from(list(Order))), max_size=30))
def test_events_run_in_a_total_order(wanted):
    """Sorted by time, rank and sequence, whatever the order of scheduling."""
    kernel, seen = Kernel(), []
    for sequence, (time_s, order) in enumerate(wanted):
        kernel.at(time_s, order, seen.append, (time_s, order, sequence))

    drain(kernel)

    assert seen == sorted(seen)
    assert len(seen) == len(wanted)
