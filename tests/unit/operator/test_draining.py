"""What an Event says of a service's drains."""

import pytest

from penstock_operator.draining import scale_message
from penstock_operator.plan.drain import ScalePlan


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (ScalePlan(2, start_drain=("d-1",)), "decode: d-1 finishes its requests before decode shrinks to 2"),
        (
            ScalePlan(2, start_drain=("d-1", "d-2")),
            "decode: d-1, d-2 finish their requests before decode shrinks to 2",
        ),
        (ScalePlan(2, restore=("d-1",)), "decode: d-1 serves again; desired replicas: 2"),
        (ScalePlan(2), None),
    ],
)
def test_the_event_of_a_drain_names_its_pods(plan, text):
    """One or several, in a sentence."""
    assert scale_message("decode", plan, 2) == text
