"""Small worlds: workloads and scenarios that can be computed by hand."""

import pytest

from penstock.api import Role
from penstock.simulator.scenario import PoolSpec, ProfiledModel, Scenario, SimpleModel, unbounded_router
from penstock.workload.traces import TraceRequest

SIMPLE = SimpleModel("test", 0.001, 100_000)
"""1 ms per token."""

PROFILE = ProfiledModel("a100-llama-8b-bf16-tp1")


@pytest.fixture
def request_at():
    """Make a request; its block ids are its own unless they are given."""

    def make(at_s, tokens=1000, outputs=10, ids=None, line=None):
        made = int(at_s * 1e6) + 1 if line is None else line
        count = -(-tokens // 512)
        own = tuple(range(made * 1000, made * 1000 + count)) if ids is None else ids
        return TraceRequest(at_s, tokens, outputs, own, made)

    return make


@pytest.fixture
def simple_world():
    """Make a scenario of simple servers, one request at a time each."""

    def make(servers=1, *, policy="least-loaded", model=SIMPLE, router=None, **options):
        chosen = router or unbounded_router(policy)
        return Scenario(pools=(PoolSpec(Role.AGGREGATED, servers, model),), router=chosen, **options)

    return make


@pytest.fixture
def split_world():
    """Make a scenario of engines with prefill and decode apart."""

    def make(prefill=2, decode=2, *, router=None, model=PROFILE, **options):
        pools = (PoolSpec(Role.PREFILL, prefill, model), PoolSpec(Role.DECODE, decode, model))
        return Scenario(pools=pools, router=router or unbounded_router("least-loaded"), **options)

    return make
