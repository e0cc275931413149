"""Fixtures of the router's tests."""

import sys
from pathlib import Path

import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parent))

from gateway_harness import gateways
from router_harness import Harness


def pytest_asyncio_loop_factories(config, item):
    """Run these tests on the loop that the processes run on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def harness(no_cover, tmp_path):
    """Fake workers and routers; all stopped at the end. Coverage is off, as these tests run in real time."""
    harness = Harness(tmp_path / "llama.json")
    yield harness
    await harness.close()


@pytest.fixture
async def gateway(harness, tmp_path):
    """Start pickers and gateways; all stopped at the end."""
    async for start in gateways(harness, tmp_path):
        yield start


@pytest.fixture
def served(harness, gateway):
    """Start an aggregated worker and a gateway before it."""

    async def start(**options):
        worker = await harness.worker("aggregated")
        return worker, await gateway(worker, **options)

    return start
