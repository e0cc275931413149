"""When a lease of the simulated engine would end, for comparison with a real one under equal settings."""

from collections.abc import Collection
from dataclasses import dataclass

from penstock.engine.core.batching import BatchLimits
from penstock.engine.core.engine import Engine, EngineSettings
from penstock.engine.core.latency import LatencyModel, LinearDecode, QuadraticPrefill
from penstock.engine.core.lease import HeartbeatSchedule, LeaseTerms
from penstock.engine.core.requests import EngineRequest, EngineRole

_AT_ONCE = LatencyModel(QuadraticPrefill(1e-9, 0.0, 0.0), LinearDecode(1e-9, 0.0, 0.0))
_PROMPT = "prompt"


@dataclass(frozen=True)
class LeaseSequence:
    """One lease, from its grant at 0 to its end; seconds.

    Attributes:
        expiries: (time of a heartbeat that arrived, the lease's end after it), in order.
        reclaimed_s: When the blocks are freed.
    """

    expiries: tuple[tuple[float, float], ...]
    reclaimed_s: float


def simulated_lease(
    duration_s: float,
    *,
    tracked_s: float = 0.0,
    silent_from_s: float,
    dropped: Collection[int] = (),
) -> LeaseSequence:
    """Return what the simulated prefill and decode workers make of one prompt that is never read.

    Args:
        duration_s: ``kv_lease_duration`` of both.
        tracked_s: When the request enters decode's scheduler, seconds after the grant, >= 0.
        silent_from_s: No heartbeat is sent from here on: decode is stopped, killed or paused.
        dropped: Heartbeats that are lost on the way, counted from 0.
    """
    terms = LeaseTerms(duration_s)
    engine = Engine(EngineSettings(EngineRole.PREFILL, 8, 1, BatchLimits(), terms), _AT_ONCE)
    engine.add(EngineRequest(_PROMPT, 16, 1, 0.0, pin_blocks=True))
    step = engine.begin_step(0.0)
    assert step is not None
    engine.finish_step(step)
    schedule = HeartbeatSchedule(terms.heartbeat_interval_s)
    schedule.track("prefill", _PROMPT)
    end_s = engine.pinned.next_expiry_s() or 0.0
    expiries, now_s, number = [], tracked_s, 0
    while now_s < min(silent_from_s, end_s):
        for ids in schedule.due(now_s).values():
            if number not in dropped:
                engine.pinned.renew(ids, now_s)
                end_s = engine.pinned.next_expiry_s() or end_s
                expiries.append((now_s, round(end_s, 6)))
            number += 1
        now_s = schedule.next_s() or silent_from_s
    return LeaseSequence(tuple(expiries), round(end_s, 6))
