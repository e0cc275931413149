"""Conversion of NVIDIA's DynamoGraphDeployments, with what has no counterpart listed. Pure."""

from penstock_dynamo.importer.convert import import_dgd

__all__ = ["import_dgd"]
