"""Fixtures of the router's tests."""

import sys
from pathlib import Path

import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parent))

from router_harness import Harness


def pytest_asyncio_loop_factories(config, item):
    """Run these tests on the loop that the processes run on."""
    return {"uvloop": uvloop.new_event_loop}


@pytest.fixture
async def harness(no_cover):
    """Fake workers and routers; all stopped at the end. Coverage is off, as these tests run in real time."""
    harness = Harness()
    yield harness
    await harness.close()


@pytest.fixture
def write_graph(harness, tmp_path):
    """Write the workers and routers into one statefile."""

    def write(workers, routers):
        return harness.write_state(tmp_path / "state.json", workers, routers)

    return write
