"""Ports of router and workers in their pods, which the API refuses for other uses, runtimes give and routers call; their host."""

from __future__ import annotations

from typing import Final

EVERY_ADDRESS: Final = "::"
"""The host of a server that is reached at every address of its pod or machine, of IPv6 and of IPv4."""

WORKER_PORT: Final = 8000
"""Port of router and workers."""

SIDE_CHANNEL_PORT: Final = 5600
"""Port of vLLM's KV side channel in worker pods; vLLM's default."""
