"""The charts of the page: what is drawn of what is known."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from observed_fleets import observed

from penstock.api import Role, SloConfig
from penstock.assess.charts import Curve, _runs, charts
from penstock.simulator.observer import RunSample

SLO = SloConfig(ttft="250ms")


def run(*ttft_s):
    """One request a minute with these times to the first token, on three replicas."""
    at_s = 60.0 * np.arange(len(ttft_s))
    samples = tuple(RunSample(each, (), {Role.AGGREGATED: (3, 0, 0)}, 3) for each in at_s.tolist())
    requests = SimpleNamespace(arrival_s=at_s, ttft_s=np.array(ttft_s, dtype=float))
    return SimpleNamespace(requests=requests, samples=samples)


def names(figure):
    """The lines that a figure has, in order."""
    return re.search(r'aria-label="[^:]*: ([^"]*)"', figure)[1].split(", ")


def test_load_replicas_and_shares_are_drawn_next_to_the_recommended_fleet():
    """Each figure is well-formed, has its lines, and needs nothing from elsewhere."""
    found = charts(observed([60] * 20), SLO, run(*[0.1] * 15, *[9.0] * 5), None)
    assert [names(each) for each in found] == [
        ["requests a second"], ["ran", "recommended", "ready"], ["served", "recommended"],
    ]  # fmt: skip
    for each in found:
        root = ET.fromstring(each)
        assert len(root.findall(".//polyline")) == len(root.findall(".//tspan"))
        assert "http" not in each


def test_without_observed_latencies_the_simulation_of_what_ran_is_drawn():
    """And without any there is no chart of shares."""
    window = observed([60] * 20, ttft=None)
    assert names(charts(window, SLO, None, run(*[0.1] * 20))[2]) == ["as it ran", "simulated"]
    assert len(charts(window, SLO, None, None)) == 2


def test_a_share_counts_requests_that_were_never_served_as_late():
    """Half of the second ten minutes has no first token: the line ends at 50%, at the bottom of the chart."""
    figure = charts(observed([60] * 20), SLO, run(*[0.1] * 10, *[0.1, math.nan] * 5), None)[2]
    assert ">50<" in figure


def test_an_unknown_value_interrupts_a_line():
    """A stepped value holds until the next time."""
    values = np.array([1.0, 2.0, math.nan, 4.0])
    at_s = np.arange(4.0)
    assert _runs(Curve("x", "red", at_s, values)) == [[(0.0, 1.0), (1.0, 2.0)], [(3.0, 4.0)]]
    stepped = _runs(Curve("x", "red", at_s, values, is_stepped=True))
    assert stepped == [[(0.0, 1.0), (1.0, 1.0), (1.0, 2.0), (2.0, 2.0)], [(3.0, 4.0)]]


@pytest.mark.parametrize("counts", [[0] * 20, [math.nan] * 20])
def test_a_window_without_load_is_drawn(counts):
    """An empty axis rather than an error."""
    assert len(charts(observed(counts, ttft=None), SLO, None, None)) == 2
