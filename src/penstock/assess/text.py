"""Says what came of an assessment: as plain data, and as tables for terminal and page. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final

from penstock.assess.assessment import Assessment
from penstock.assess.calibration import MOST_GAP_OFF, MOST_SHARE_OFF, MOST_TTFT_OFF, Calibration, ServedHour
from penstock.assess.fleets import Fleet, FleetKind, Spread

SCHEMA: Final = "penstock-assess/1"
UNKNOWN: Final = "-"


def as_plain(found: Assessment, files: Sequence[str], *, queries: int) -> dict[str, Any]:
    """Return the result as plain data; what is unknown is null."""
    window, observed = found.window, found.observed
    made: dict[str, Any] = _finite(
        {
            "schema": SCHEMA,
            "result": found.recommendation.sentence,
            "is_recommended": found.recommendation.plan is not None,
            "reasons": list(found.recommendation.reasons),
            "observed": {
                "model": observed.model,
                "runtime": observed.runtime,
                "start": _time(observed.start_s),
                "hours": observed.duration_s / 3600,
                "requests": observed.requests,
                "gpu_hours": observed.replica_hours * found.options.gpus,
                "queries": queries,
                "notes": list(observed.notes),
            },
            "simulated": {
                "start": _time(window.start_s),
                "hours": window.duration_s / 3600,
                "requests": len(found.trace.requests),
                "seeds": found.options.seeds,
                "profile": found.fit.name,
                "slo": found.options.slo.model_dump(mode="json", by_alias=True),
            },
            "calibration": None if found.calibration is None else asdict(found.calibration),
            "fleets": [_plain_fleet(each, found.options.gpu_price) for each in found.fleets],
            "files": list(files),
        }
    )
    return made


def _plain_fleet(fleet: Fleet, price: float | None) -> dict[str, Any]:
    made = {key: value for key, value in asdict(fleet).items() if key != "plan"}
    made["cost"] = None if price is None else fleet.gpu_hours.mean * price
    return made


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _time(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M UTC")


def facts(found: Assessment) -> list[tuple[str, str]]:
    """Return what was read and simulated."""
    observed, window, options = found.observed, found.window, found.options
    slo = options.slo
    target = f"first token within {_s(slo.ttft_seconds)}"
    if slo.itl_seconds is not None:
        target += f", {_s(slo.itl_seconds)} between tokens"
    read = (
        f"{observed.duration_s / 3600:.1f} h from {_time(observed.start_s)}: {observed.requests:,.0f} requests,"
        f" {observed.replica_hours * options.gpus:,.1f} GPU-hours"
    )
    simulated = (
        f"{window.duration_s / 3600:.1f} h from {_time(window.start_s)}: {len(found.trace.requests):,} requests,"
        f" {options.seeds} seed{'s' if options.seeds > 1 else ''}"
    )
    rows = [
        ("model", f"{observed.model}, {observed.runtime}"),
        ("observed", read),
        ("simulated", simulated),
        ("target", f"{target}, for {slo.attainment:.1%} of the requests"),
        ("engine", found.fit.name),
        ("starts take", f"{_s(options.cold_start_s)} (--cold-start)"),
    ]
    if window.steps < observed.steps:
        rows.append(
            (
                "left out",
                "what does not fit into --max-requests; the simulated hours are those around the busiest minute",
            )
        )
    return rows


FLEET_HEADS: Final = (
    "fleet",
    "in time",
    "GPU-hours",
    "to the fleet that ran",
    "lost",
    "TTFT p50",
    "TTFT p99",
    "peak GPUs",
)


def fleet_rows(found: Assessment) -> list[tuple[str, ...]]:
    """Return a row for each fleet, under `FLEET_HEADS`, and the cost where a price is given."""
    ran = next(each for each in found.fleets if each.kind is FleetKind.RAN)
    price = found.options.gpu_price
    rows: list[tuple[str, ...]] = []
    for each in found.fleets:
        change = each.gpu_hours.mean / ran.gpu_hours.mean - 1 if ran.gpu_hours.mean else 0.0
        row = (
            each.name,
            _spread(each.in_time, 100, "%"),
            _spread(each.gpu_hours, 1, ""),
            UNKNOWN if each is ran else f"{change:+z.0%}",
            _spread(each.lost, 1, "", digits=0),
            _s_spread(each.ttft_p50_s),
            _s_spread(each.ttft_p99_s),
            str(each.peak_gpus),
        )
        rows.append(row if price is None else (*row, f"{each.gpu_hours.mean * price:,.2f}"))
    return rows


def fleet_heads(found: Assessment) -> tuple[str, ...]:
    """Return the headings of `fleet_rows`."""
    return FLEET_HEADS if found.options.gpu_price is None else (*FLEET_HEADS, "cost")


CALIBRATION_HEADS: Final = (
    "hour",
    "requests",
    "in time, served",
    "simulated",
    "TTFT p50, served",
    "simulated",
    "TTFT p90, served",
    "simulated",
    "token gap, served",
    "simulated",
)


def calibration_rows(calibration: Calibration, *, with_hours: bool) -> list[tuple[str, ...]]:
    """Return a row for all hours together, and one for each."""
    rows = [_served("all", calibration.whole)]
    if with_hours:
        rows += [_served(_time(each.at_s), each) for each in calibration.hours]
    return rows


def _served(name: str, hour: ServedHour) -> tuple[str, ...]:
    return (
        name,
        f"{hour.requests:,.0f}",
        _share(hour.observed_in_time),
        _share(hour.simulated_in_time),
        _s(hour.observed_ttft_p50_s),
        _s(hour.simulated_ttft_p50_s),
        _s(hour.observed_ttft_p90_s),
        _s(hour.simulated_ttft_p90_s),
        _s(hour.observed_gap_s),
        _s(hour.simulated_gap_s),
    )


def calibration_sentence(calibration: Calibration) -> str:
    """Return by how much the model of the fleet that ran is off, and what is accepted."""
    parts = [
        f"{what} {100 * value:+z.1f} {unit} (accepted: {100 * bound:.0f})"
        for what, value, unit, bound in (
            ("share in time", calibration.share_off, "points", MOST_SHARE_OFF),
            ("mean TTFT", calibration.ttft_off, "%", MOST_TTFT_OFF),
            ("mean time between tokens", calibration.gap_off, "%", MOST_GAP_OFF),
        )
        if value is not None
    ]
    if not parts:
        return "Nothing was observed that the simulation could be compared with."
    return f"The simulation of the fleet that ran is off by: {'; '.join(parts)}."


def _spread(value: Spread, factor: float, unit: str, *, digits: int | None = None) -> str:
    if digits is None:
        digits = 1 if value.mean * factor >= 10 or unit else 2
    text = f"{value.mean * factor:,.{digits}f}{unit}"
    if (value.high - value.low) * factor < 10**-digits / 2:
        return text
    return f"{text} ({value.low * factor:,.{digits}f} to {value.high * factor:,.{digits}f})"


def _s_spread(value: Spread | None) -> str:
    if value is None:
        return UNKNOWN
    low, high = _s(value.low), _s(value.high)
    return _s(value.mean) if low == high else f"{_s(value.mean)} ({low} to {high})"


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def _s(value: float | None) -> str:
    if value is None:
        return UNKNOWN
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
