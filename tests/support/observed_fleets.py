"""Small observed fleets."""

from __future__ import annotations

import math

import numpy as np

from penstock.assess.observed import Buckets, Observed

BOUNDS = (100.0, 200.0, 500.0, 1000.0, math.inf)


def buckets(shares, counts, mean, bounds=BOUNDS):
    """A histogram with the same shares in every step."""
    samples = np.array(counts, dtype=float)
    return Buckets(bounds, samples[:, None] * np.array(shares, dtype=float), samples * mean)


def observed(arrivals, **changes):
    """Requests a minute, of 350 prompt tokens and 150 answer tokens on average, on two replicas."""
    counts = np.array(arrivals, dtype=float)
    given = {
        "model": "llama",
        "runtime": "vllm",
        "start_s": 1_700_000_040.0,
        "step_s": 60.0,
        "arrivals": counts,
        "prompts": buckets((0, 0.2, 0.8, 0, 0), counts, 350.0),
        "answers": buckets((0, 1.0, 0, 0, 0), counts, 150.0),
        "ttft": buckets((0.5, 0.5, 0), counts, 0.12, (0.1, 0.25, math.inf)),
        "gaps": buckets((1.0, 0), counts * 100, 0.02, (0.05, math.inf)),
        "replicas": np.full(len(counts), 2.0),
        "replica_step_s": 60.0,
    }
    return Observed(**(given | changes))
