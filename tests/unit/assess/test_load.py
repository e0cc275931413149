"""The trace that is made from what was observed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from observed_fleets import observed

from penstock.assess.load import make_trace
from penstock.assess.observed import dispersion
from penstock.workload.trace_info import describe_trace


def test_a_trace_has_the_observed_rates_lengths_and_means():
    """Every minute has its requests, lengths stay in their buckets, and means are kept within two percent."""
    seen = observed([60, 0, 240, math.nan, 300] * 12)
    trace = make_trace(seen, seed=0)
    counts = np.bincount([int(request.arrival_s // 60) for request in trace.requests], minlength=60)
    assert counts.tolist() == [60, 0, 240, 0, 300] * 12
    prompts = np.array([request.input_tokens for request in trace.requests])
    assert prompts.min() > 100
    assert prompts.max() <= 500
    assert prompts.mean() == pytest.approx(350, rel=0.02)
    assert np.mean(prompts <= 200) == pytest.approx(0.2, abs=0.02)
    assert np.mean([request.output_tokens for request in trace.requests]) == pytest.approx(150, rel=0.02)


def test_the_same_seed_gives_the_same_trace_and_another_seed_another():
    """Fractions of requests are rounded over time, so that none is lost."""
    seen = observed([0.4] * 100)
    trace = make_trace(seen, seed=1)
    assert len(trace.requests) == 40
    assert make_trace(seen, seed=1) == trace
    assert make_trace(seen, seed=2).sha256 != trace.sha256


@pytest.mark.parametrize("rate", [0.0, 0.3, 0.6])
def test_prompts_share_what_the_prefix_cache_found(rate):
    """One endless cache finds the observed share of the tokens, within three points."""
    seen = observed([200] * 30, hit_rate=np.full(30, rate))
    described = describe_trace(make_trace(seen, seed=0))
    assert described.reuse.tokens_fraction == pytest.approx(rate, abs=0.03)


def test_clumps_within_the_minute_come_back():
    """Scrapes of 15 s whose counts vary ten times as much as Poisson's give a trace that does, too."""
    rng = np.random.default_rng(0)
    fine = rng.poisson(rng.gamma(4, 25, 240)).astype(float)
    seen = observed([400] * 80, fine=fine, fine_step_s=15.0)
    arrivals = [request.arrival_s for request in make_trace(seen, seed=0).requests]
    made = dispersion(np.bincount(np.array(arrivals, dtype=int) // 15, minlength=320))
    assert made == pytest.approx(dispersion(fine), rel=0.35)
    calm = [request.arrival_s for request in make_trace(observed([400] * 80), seed=0).requests]
    assert dispersion(np.bincount(np.array(calm, dtype=int) // 15, minlength=320)) < 1.2
