"""Pure but for asking whether a port is free: an entry becomes the command, ports and environment of a process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.api import Role
from penstock.local.liveness import MARK_VARIABLE
from penstock.local.ports import choose_port, is_free
from penstock.local.statefile import ProcessEntry
from penstock.runtimes import fill

GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"


def ports_for(entry: ProcessEntry, entries: Iterable[ProcessEntry]) -> dict[str, int]:
    """Return a port for each placeholder: the router's stays, a worker's stays while no other process took it.

    Raises:
        ClusterError: no port is free.
    """
    taken = {port for other in entries for port in other.ports.values()}
    ports: dict[str, int] = {}
    for placeholder in entry.placeholders:
        kept = entry.ports.get(placeholder)
        if kept is None or not (entry.role == Role.ROUTER or is_free(kept)):
            kept = choose_port(taken)
        ports[placeholder] = kept
        taken.add(kept)
    return ports


def argv_of(entry: ProcessEntry) -> list[str]:
    """Return the command with the chosen ports filled in."""
    return [fill(argument, entry.ports) for argument in entry.cmd]


def environment_of(entry: ProcessEntry, statefile: str, inherited: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to set on top of ``inherited``: the entry's own, its GPUs and the arbiter's mark."""
    environment = {name: fill(value, entry.ports) for name, value in entry.env.items()}
    environment[MARK_VARIABLE] = statefile
    if entry.is_worker:
        environment[GPU_VARIABLE] = visible_devices(entry.gpus, inherited.get(GPU_VARIABLE))
    return environment


def visible_devices(gpus: tuple[int, ...], inherited: str | None) -> str:
    """Return ``CUDA_VISIBLE_DEVICES`` for ids of the allocator.

    The ids count the devices that the arbiter itself may see, so an inherited list is indexed.

    Args:
        gpus: Allocated ids.
        inherited: The arbiter's own variable, or None when it sees every device.
    """
    labels = [label.strip() for label in inherited.split(",") if label.strip()] if inherited else []
    return ",".join(labels[gpu] if gpu < len(labels) else str(gpu) for gpu in gpus)
