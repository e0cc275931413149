"""A statefile and an entry to begin with, for the tests of the local backend."""

from __future__ import annotations

from dataclasses import replace

from penstock.local.statefile import ArbiterInfo, ProcessEntry, StateFile


def make_state(namespace: str = "dynamo", *, gpus: int = 8, budget: int | None = None, **fields) -> StateFile:
    """Return a statefile without entries."""
    arbiter = ArbiterInfo(
        namespace=namespace,
        graph="graph.yaml",
        model="llama",
        gpus=gpus,
        budget=gpus if budget is None else budget,
        router_url="http://127.0.0.1:9",
    )
    return StateFile(replace(arbiter, **fields), {})


def make_entry(service: str = "VllmWorker", role: str = "decode", **fields) -> ProcessEntry:
    """Return an entry of a one-GPU decode worker, with changes."""
    defaults = {"cmd": ("worker", "--port", "{port}"), "gpus_per_replica": 1, "order": 1}
    return ProcessEntry(service=service, role=role, **{**defaults, **fields})
