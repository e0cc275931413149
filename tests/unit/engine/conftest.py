"""Engines with round latencies, so that tests can be computed by hand."""

import pytest

from penstock_engine.core.batching import BatchLimits
from penstock_engine.core.engine import Engine, EngineSettings
from penstock_engine.core.latency import LatencyModel, LinearDecode, QuadraticPrefill
from penstock_engine.core.lease import LeaseTerms
from penstock_engine.core.requests import EngineRequest, EngineRole
from penstock_engine.core.timeline import Timeline
from penstock_engine.core.transfer import LinkTerms


@pytest.fixture
def flat_latency():
    """TTFT = 1 s + 1 ms per token; a decode step takes 0.1 s whatever it holds."""
    return LatencyModel(QuadraticPrefill(1.0, 0.001, 0.0), LinearDecode(0.1, 0.0, 0.0))


@pytest.fixture
def make_engine(flat_latency):
    """Make an engine of small blocks (4 tokens) and a small cache."""

    def make(
        role="aggregated",
        blocks=100,
        block_size=4,
        seqs=8,
        budget=64,
        by_priority=False,
        lease_s=30.0,
        link=LinkTerms(latency_s=0.5, bytes_per_s=100.0),
    ):
        limits = BatchLimits(budget, seqs, block_size, by_priority)
        settings = EngineSettings(EngineRole(role), blocks, 1, limits, LeaseTerms(lease_s), link)
        return Engine(settings, flat_latency)

    return make


@pytest.fixture
def make_timeline(make_engine):
    """Make an engine on a timeline that starts at 0."""
    return lambda **options: Timeline(make_engine(**options))


@pytest.fixture
def request_of():
    """Make a request; its keys are private to it unless ``keys`` are given."""

    def make(name, prompt=8, outputs=4, arrival_s=0.0, keys=None, block_size=4, **options):
        if keys is None:
            keys = [hash((name, position)) & 0xFFFFFFFF for position in range(prompt // block_size)]
        return EngineRequest(name, prompt, outputs, arrival_s, keys, **options)

    return make


@pytest.fixture
def run_all():
    """Run a timeline until nothing is due; return the outcomes."""

    def run(timeline, until_s=float("inf")):
        outcomes = []
        while (due_s := timeline.next_due_s()) is not None and due_s <= until_s:
            outcomes += timeline.run_until(due_s, max_steps=1)
            assert len(outcomes) < 100_000
        return outcomes

    return run
