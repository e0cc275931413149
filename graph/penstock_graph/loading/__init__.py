"""Loading of manifests from files and text."""

from penstock_graph.loading.files import MAX_FILE_BYTES, read_text
from penstock_graph.loading.manifests import Manifests, load_graph, load_manifests, parse_manifests

__all__ = ["MAX_FILE_BYTES", "Manifests", "load_graph", "load_manifests", "parse_manifests", "read_text"]
