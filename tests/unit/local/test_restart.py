"""The restart policy."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.local.restart import GiveUp, Restart, RestartPolicy, after_exit

POLICY = RestartPolicy(first_delay_s=1, factor=2, max_delay_s=5, give_up_after=5, stable_after_s=10)


@pytest.mark.parametrize(
    ("failures", "ran_s", "was_ready", "expected"),
    [
        (0, 0.1, False, Restart(1, 1)),
        (1, 0.1, False, Restart(2, 2)),
        (2, 0.1, False, Restart(4, 3)),
        (3, 0.1, False, Restart(5, 4)),
        (4, 0.1, False, GiveUp(5)),
        (4, 9.9, True, GiveUp(5)),
        (4, 10.0, True, Restart(1, 1)),
        (4, 60.0, False, GiveUp(5)),
    ],
)
def test_pauses_double_up_to_the_cap_and_end(failures, ran_s, was_ready, expected):
    """Five failures in a row end it; only a run that was ready and lasted starts a new count."""
    assert after_exit(POLICY, failures=failures, ran_s=ran_s, was_ready=was_ready) == expected


@given(st.integers(0, 3), st.floats(0, 9))
def test_pauses_never_shrink_within_a_row(failures, ran_s):
    """Each failure in a row waits at least as long as the one before."""
    first = after_exit(POLICY, failures=failures, ran_s=ran_s, was_ready=True)
    second = after_exit(POLICY, failures=failures + 1, ran_s=ran_s, was_ready=True)
    assert isinstance(second, GiveUp) or first.delay_s <= second.delay_s
