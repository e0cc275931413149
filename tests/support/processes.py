"""A graph's processes by service, and what their command lines say."""

from __future__ import annotations

from penstock.runtimes import process_specs


def by_service(graph, context):
    """The graph's processes by service."""
    return {spec.service: spec for spec in process_specs(graph, context)}


def after(argv, flag):
    """The word after a flag."""
    return argv[argv.index(flag) + 1]
