"""How many of the desired replicas a service gets.

Pure. The ScalingAdapter's owner sets the desired number; the bounds are the graph's.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.api import ServiceSpec


@dataclass(frozen=True, slots=True)
class Bounded:
    """A desired number within its bounds.

    Attributes:
        replicas: What the operator works towards.
        reason: One word if the desired number was changed: ``TooFewReplicas``, ``TooManyReplicas``, ``OverBudget`` or
            ``NotScalable``; empty otherwise.
        message: Value, bound and remedy; empty if the desired number was not changed.
    """

    replicas: int
    reason: str = ""
    message: str = ""


def bounded(desired: int | None, service: ServiceSpec, *, max_gpu_budget: int | None) -> Bounded:
    """Return ``desired`` within the service's bounds.

    Args:
        desired: The ScalingAdapter's ``spec.replicas``; None if there is no adapter (yet).
        service: The service; without ``scaling`` its ``replicas`` are the number.
        max_gpu_budget: Most GPUs of the graph; a single service can never use more. None: no ceiling.
    """
    if service.scaling is None:
        if desired is None or desired == service.replicas:
            return Bounded(service.replicas)
        message = (
            f"{desired} replicas were asked for; the service has no scaling, so it keeps {service.replicas}"
        )
        return Bounded(service.replicas, "NotScalable", message)
    asked = service.replicas if desired is None else desired
    low, high = service.replica_bounds
    if asked < low:
        return Bounded(
            low, "TooFewReplicas", f"{asked} replicas were asked for; scaling.minReplicas is {low}"
        )
    fitting = max_gpu_budget // service.gpus if max_gpu_budget is not None and service.gpus else high
    if asked > high and high <= fitting:
        return Bounded(
            high, "TooManyReplicas", f"{asked} replicas were asked for; scaling.maxReplicas is {high}"
        )
    if asked > fitting:
        held = max(low, fitting)
        gpus = f"{asked} replicas of {service.gpus} GPUs exceed planner.maxGpuBudget {max_gpu_budget}"
        return Bounded(held, "OverBudget", f"{gpus}; {held} are kept")
    return Bounded(asked)


def held(asked: Bounded, running: int | None) -> Bounded:
    """Return the replicas of a service that a paused graph keeps.

    Args:
        asked: The desired number within its bounds.
        running: Replicas of its workload; None: there is no workload.
    """
    kept = running or 0
    if asked.replicas == kept:
        return asked
    return Bounded(
        kept, "Paused", f"{asked.replicas} replicas are wanted; the graph is paused and keeps {kept}"
    )
