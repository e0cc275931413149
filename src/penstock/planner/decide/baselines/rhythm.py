"""How often each autoscaler decides, and by how much, as its definition has it."""

from __future__ import annotations

from dataclasses import replace

from penstock.planner.decide.baselines import dynamo, dynamo_throughput, hpa, kpa
from penstock.planner.decide.config import ADAPTIVE_INTERVAL_S, DecideConfig, Mode

_INTERVALS_S = {
    Mode.HPA: hpa.SYNC_S,
    Mode.KEDA: hpa.SYNC_S,
    Mode.KPA: kpa.TICK_S,
    Mode.DYNAMO_LOAD: dynamo.TICK_S,
    Mode.DYNAMO_THROUGHPUT: dynamo_throughput.INTERVAL_S,
    Mode.ORACLE: 1.0,
    # As often, and by as much, as the planner's own default.
    Mode.ORACLE_ONE_STEP: ADAPTIVE_INTERVAL_S,
}
_ANY_STEP = frozenset({Mode.HPA, Mode.KEDA, Mode.KPA, Mode.DYNAMO_THROUGHPUT, Mode.ORACLE})


def in_mode(config: DecideConfig, mode: Mode) -> DecideConfig:
    """Return the configuration under another mode; an autoscaler that is no mode of ours gets its own interval and step.

    The planner's own modes keep what is configured.
    """
    interval_s = _INTERVALS_S.get(mode)
    if interval_s is None:
        return replace(config, mode=mode)
    return replace(
        config,
        mode=mode,
        adjustment_interval_s=interval_s,
        metric_pulling_interval_s=min(config.metric_pulling_interval_s, interval_s),
        max_step=None if mode in _ANY_STEP else 1,
    )
