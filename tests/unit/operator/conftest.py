"""Puts the helpers of these tests on the path, and gives them an API server with one graph."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
async def api():
    """An API server with the graph."""
    from fake_api import FakeApi
    from graph_harness import graph

    made = FakeApi()
    await made.create(graph(), field_manager="user")
    made.writes.clear()
    return made
