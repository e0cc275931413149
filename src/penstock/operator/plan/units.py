"""Replicas as the GPU budget counts them: a pod, or a group of pods that starts as a whole. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.operator.plan.pods import PodView


@dataclass(slots=True)
class Unit:
    """One replica: a pod, or all pods of a group.

    Attributes:
        pods: At least one.
        started: How many of them are released.
    """

    pods: list[PodView]
    started: int = 0

    @property
    def first(self) -> PodView:
        """Its oldest pod."""
        return min(self.pods, key=lambda pod: (pod.created_s, pod.name))

    @property
    def service(self) -> str:
        """Service that it belongs to."""
        return self.pods[0].service

    @property
    def gated(self) -> list[PodView]:
        """Its pods that the budget's gate still holds."""
        return [pod for pod in self.pods if pod.gated]

    @property
    def all_gpus(self) -> int:
        """GPUs of the complete replica, also of pods that do not exist yet."""
        size = max(pod.group_size for pod in self.pods)
        return max(size * max(pod.gpus for pod in self.pods), sum(pod.gpus for pod in self.pods))


def units(pods: Iterable[PodView], already_released: frozenset[str]) -> list[Unit]:
    """Return the replicas that ``pods`` are part of.

    Args:
        pods: Worker pods of one graph.
        already_released: Uids whose gate was lifted, perhaps not yet visible in ``pods``.
    """
    found: dict[tuple[str, str], Unit] = {}
    for pod in pods:
        key = (pod.service, f"group {pod.group}" if pod.group else f"pod {pod.uid}")
        unit = found.setdefault(key, Unit([]))
        unit.pods.append(pod)
        unit.started += is_started(pod, already_released)
    return list(found.values())


def is_started(pod: PodView, already_released: frozenset[str]) -> bool:
    """Return whether a pod's gate is lifted, so that it counts against the budget."""
    return not pod.gated or pod.uid in already_released
