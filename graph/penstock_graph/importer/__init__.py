"""Conversion of other systems' manifests."""

from penstock_graph.importer.convert import ImportResult, import_dgd
from penstock_graph.importer.source import Unconverted

__all__ = ["ImportResult", "Unconverted", "import_dgd"]
