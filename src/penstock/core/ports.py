"""Ports and listen address of routers and workers in their pods.

The API refuses these ports for other uses, runtimes pass them to their processes, and routers connect to them.
"""

from __future__ import annotations

from typing import Final

EVERY_ADDRESS: Final = "::"
"""Host to listen on for a server that is reachable at every address of its pod or machine, IPv6 and IPv4."""

WORKER_PORT: Final = 8000
"""HTTP port of routers and workers."""

SIDE_CHANNEL_PORT: Final = 5600
"""Port of vLLM's KV side channel in worker pods; vLLM's default."""
