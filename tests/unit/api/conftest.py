"""Where a runtime's processes are built for."""

from __future__ import annotations

import pytest

from penstock.runtimes import RuntimeContext


@pytest.fixture(name="context")
def made_context():
    """A local context at speed 1."""
    return RuntimeContext(
        python="/py", graph_file="/g.yaml", discovery="/state/llama.json", namespace="llama"
    )
