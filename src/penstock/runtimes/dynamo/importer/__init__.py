"""Conversion of NVIDIA's DynamoGraphDeployments, with what has no counterpart listed. Pure."""

from penstock.runtimes.dynamo.importer.convert import ImportResult, import_dgd
from penstock.runtimes.dynamo.importer.source import Unconverted

__all__ = ["ImportResult", "Unconverted", "import_dgd"]
