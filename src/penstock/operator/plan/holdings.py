"""How many replicas of each service hold GPUs, from look to look: what a service loses it gets back.

Pure. A rollout, a kill or a lost node frees GPUs a moment before the replacement asks for them, and in that
moment another service's waiting pod would take them: the ratio of the services would change, and a rollout that
may have one replica away would wait for it for ever. So what a service held stays its own while its workload
wants that many replicas, for `KEEP_S` also before the replacement exists.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from penstock.operator.plan.pods import PodView
from penstock.operator.plan.units import units

KEEP_S: Final = 10.0
"""How long GPUs are kept for a replacement that does not exist yet. Chosen: a workload's controller makes it
within a second; one whose pods are refused must not hold up the others."""


@dataclass(frozen=True, slots=True)
class Holding:
    """What one service holds.

    Attributes:
        replicas: Replicas that hold GPUs, terminating ones and those lost since ``lost_s`` included.
        gpus: GPUs of one of them.
        lost_s: Since when fewer hold GPUs, seconds since the epoch; None: all of them do.
    """

    replicas: int
    gpus: int
    lost_s: float | None = None


def holdings(
    pods: Iterable[PodView],
    before: Mapping[str, Holding],
    *,
    already_released: frozenset[str],
    replicas: Mapping[str, int],
    now_s: float,
) -> dict[str, Holding]:
    """Return what each service holds now, or is to get back.

    Args:
        pods: All worker pods of the graph.
        before: What it held at the last look; empty if unknown.
        already_released: Uids whose gate was lifted, perhaps not yet visible in ``pods``.
        replicas: By service, the number that its workload is to have.
        now_s: Seconds since the epoch.
    """
    started = [each for each in units(_unfinished(pods), already_released) if each.started]
    counts = Counter(each.service for each in started)
    found = {}
    for service in {*counts, *before} & set(replicas):
        sizes = [each.all_gpus for each in started if each.service == service]
        was = before.get(service)
        number, wanted = counts[service], replicas[service]
        gpus = max(sizes) if was is None or sizes else was.gpus
        kept = 0 if was is None else min(was.replicas, wanted)
        lost_s = now_s if was is None or was.lost_s is None else was.lost_s
        if number < kept and now_s - lost_s < KEEP_S:
            found[service] = Holding(kept, gpus, lost_s)
        else:
            found[service] = Holding(min(number, wanted), gpus)
    return found


def lost(
    held: Mapping[str, Holding], pods: Iterable[PodView], already_released: frozenset[str]
) -> Counter[str]:
    """Return how many replicas each service has lost that it is to get back.

    Args:
        held: From `holdings`, at the last look.
        pods: All worker pods of the graph.
        already_released: As in `holdings`.
    """
    missing = Counter({service: each.replicas for service, each in held.items()})
    started = [each for each in units(_unfinished(pods), already_released) if each.started]
    missing.subtract(each.service for each in started)
    return +missing


def _unfinished(pods: Iterable[PodView]) -> list[PodView]:
    return [pod for pod in pods if not pod.finished]
