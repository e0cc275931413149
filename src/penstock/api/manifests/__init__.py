"""Manifests as users write them: loading with line numbers, messages, the reference of every key."""

from penstock.api.manifests.loading import Manifests, load_graph, load_manifests, load_pool, parse_manifests
from penstock.api.manifests.nodes import MAX_FILE_BYTES, STDIN, read_text

__all__ = [
    "MAX_FILE_BYTES",
    "STDIN",
    "Manifests",
    "load_graph",
    "load_manifests",
    "load_pool",
    "parse_manifests",
    "read_text",
]
