"""Contexts that the API's tests share."""

from __future__ import annotations

import pytest

from penstock.runtimes import RuntimeContext


@pytest.fixture
def context() -> RuntimeContext:
    """A local context at speed 1."""
    return RuntimeContext(
        python="/py", graph_file="/g.yaml", discovery="/state/llama.json", namespace="llama"
    )
