"""Says how two fleets compare, the one that ran and the shadow planner's: sentences, tables, one HTML page, plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from penstock.api import SloConfig
from penstock.assess.calibration import ServedHour
from penstock.assess.charts import BLUE, VERMILION, Curve, Span, figure, observed_shares, simulated_shares
from penstock.assess.shadow.comparison import Held, ShadowHistory
from penstock.assess.shadow.prediction import Prediction
from penstock.assess.text import CALIBRATION_HEADS, calibration_rows, calibration_sentence
from penstock.core.errors import ConfigError, unwritable
from penstock.report.html_parts import page, pairs, table, text
from penstock.report.text import counted, decisions

PAGE_FILE: Final = "report.html"
SCHEMA: Final = "penstock-shadow-report/1"
HEADS: Final = ("fleet", "", "GPU-hours", "mean replicas", "peak", "changes", "in time", "TTFT p50", "p90")
_NOTE: Final = (
    "Measured: replicas as read while the planner ran, and the first tokens that Prometheus counted. Decided: the replicas that the"
    " planner's decisions amount to; none of them existed. Predicted: a simulation of the measured load, not a measurement. GPU-hours"
    " count ready and starting replicas, not draining ones, of both fleets."
)


@dataclass(frozen=True, slots=True)
class ShadowReport:
    """Everything that is reported.

    Attributes:
        history: Replicas of both fleets, and the decisions.
        slo: Targets that count as in time.
        prediction: What would have been served; None: it could not be simulated.
        remarks: Further sentences for the reader, such as why there is no prediction.
    """

    history: ShadowHistory
    slo: SloConfig
    prediction: Prediction | None
    remarks: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences that qualify the figures."""
        doubts = () if self.prediction is None else self.prediction.refusals
        return (
            *self.history.notes,
            *(f"do not trust the prediction: {each}" for each in doubts),
            *self.remarks,
        )


def headline(report: ShadowReport) -> str:
    """Return the result in one sentence."""
    found, made = report.history, report.prediction
    hours, own = found.watched_hours, found.shadow_hours
    change = "" if not hours else f" ({own / hours - 1:+z.0%})"
    served = predicted = ""
    if made is not None and made.watched.whole.observed_in_time is not None:
        served = f" and served {made.watched.whole.observed_in_time:.1%} in time"
    share = None if made is None or made.refusals else made.shadow.whole.simulated_in_time
    if share is not None:
        predicted = f", with {share:.1%} in time as a simulation predicts"
    return (
        f"In {found.duration_s / 3600:.1f} h the autoscaler used {hours:,.2f} GPU-hours{served}; Penstock's planner would have held"
        f" {own:,.2f} GPU-hours{change}{predicted}."
    )


def rows(report: ShadowReport) -> list[tuple[str, ...]]:
    """Return the table's rows: both fleets' replicas, and what was served and is predicted."""
    found, made = report.history, report.prediction
    lines = []
    for role in found.watched:
        name = "" if len(found.watched) == 1 else f", {role.value}"
        watched, shadow = _held(found.watched[role]), _held(found.shadow[role])
        seen = ("-",) * 3 if made is None else _served(made.watched.whole, is_observed=True)
        expected = ("-",) * 3 if made is None else _served(made.shadow.whole, is_observed=False)
        lines.append((f"the autoscaler{name}", "measured", *watched, *seen))
        if made is not None:
            again = _served(made.watched.whole, is_observed=False)
            lines.append(("the autoscaler", "the same, simulated", *("",) * 4, *again))
        lines.append(
            (
                f"Penstock{name}",
                "decided" if made is None else "decided; in time: predicted",
                *shadow,
                *expected,
            )
        )
    return lines


def _held(held: Held) -> tuple[str, ...]:
    return f"{held.hours:,.2f}", f"{held.mean:.2f}", str(held.peak), str(held.changes)


def _served(whole: ServedHour, *, is_observed: bool) -> tuple[str, ...]:
    share, p50_s, p90_s = (
        (whole.observed_in_time, whole.observed_ttft_p50_s, whole.observed_ttft_p90_s)
        if is_observed
        else (whole.simulated_in_time, whole.simulated_ttft_p50_s, whole.simulated_ttft_p90_s)
    )
    times = ("-" if each is None else f"{each:.2f} s" for each in (p50_s, p90_s))
    return "-" if share is None else f"{share:.1%}", *times


def facts(report: ShadowReport) -> list[tuple[str, str]]:
    """Return where the figures are from."""
    found, made = report.history, report.prediction
    lines = [
        ("model", found.record.model),
        ("watched", f"{', '.join(found.record.pools)}, from {found.record.prometheus}"),
        ("readings", f"{len(found.run.pulls):,} over {found.duration_s / 3600:.2f} h"),
        ("target", f"first token within {report.slo.ttft_seconds:g} s"),
        ("decisions", counted(found.run.decisions)),
    ]
    if made is not None:
        lines += [
            (
                "simulated",
                f"{made.requests:,} requests in {made.window.duration_s / 3600:.2f} h, engine {made.fit.name}",
            ),
            ("simulation's error", calibration_sentence(made.watched)),
        ]
    return lines


def as_plain(report: ShadowReport, files: Sequence[Path]) -> dict[str, Any]:
    """Return the report as plain data; what is unknown is null."""
    found, made = report.history, report.prediction

    def fleet(held: Held) -> dict[str, Any]:
        return {
            "gpu_hours": held.hours,
            "mean_replicas": held.mean,
            "peak_replicas": held.peak,
            "changes": held.changes,
            "at_s": held.at_s.tolist(),
            "ready": held.ready.tolist(),
            "replicas": held.replicas.tolist(),
        }

    whole = None if made is None else made.watched.whole
    return {
        "schema": SCHEMA,
        "result": headline(report),
        "duration_s": found.duration_s,
        "watched": {
            "gpu_hours": found.watched_hours,
            "in_time": None if whole is None else whole.observed_in_time,
            "simulated_in_time": None if whole is None else whole.simulated_in_time,
            "roles": {role.value: fleet(each) for role, each in found.watched.items()},
        },
        "shadow": {
            "gpu_hours": found.shadow_hours,
            "predicted_in_time": None if made is None else made.shadow.whole.simulated_in_time,
            "is_prediction_trusted": made is not None and not made.refusals,
            "roles": {role.value: fleet(each) for role, each in found.shadow.items()},
        },
        "notes": list(report.notes),
        "files": [str(each) for each in files],
    }


def render_page(report: ShadowReport) -> str:
    """Return the page, with the result in its first sentence."""
    found, made = report.history, report.prediction
    changes = decisions(found.run.decisions)
    parts = [
        f"<h1>{text(f'Penstock next to the autoscaler of {found.record.model}')}</h1>",
        f'<p class="result">{text(headline(report))}</p>',
        *(f'<p class="mark">{text(note)}</p>' for note in report.notes),
        table(HEADS, rows(report), texts=2),
        f"<p>{text(_NOTE)}</p>",
        "<h2>Over time</h2>",
        *_charts(report),
        "<h2>Where the figures are from</h2>",
        pairs(facts(report)),
    ]
    if made is not None:
        parts += [
            "<h2>How far the simulation can be trusted</h2>",
            f"<p>{text(calibration_sentence(made.watched))}</p>",
            table(CALIBRATION_HEADS, calibration_rows(made.watched, with_hours=True)),
        ]
    parts += [
        "<h2>Decisions that changed the shadow fleet</h2>",
        table(changes.heads[:3], [row[:3] for row in changes.rows], texts=3),
    ]
    return page(f"Penstock shadow report: {found.record.model}", parts)


def _charts(report: ShadowReport) -> list[str]:
    found, made = report.history, report.prediction
    span = Span(found.start_s, found.duration_s)
    demands = [(each.at_s, each.demand) for each in found.run.pulls]
    load = np.array([np.nan if each is None else each.arrivals / each.period_s for _, each in demands])
    at_s = np.array([at for at, _ in demands])
    made_of = [figure("Load", [Curve("requests a second", BLUE, at_s, load)], span)]
    for role, watched in found.watched.items():
        shadow = found.shadow[role]
        made_of.append(
            figure(
                "Replicas" if len(found.watched) == 1 else f"Replicas, {role.value}",
                [
                    Curve("autoscaler, measured", BLUE, watched.at_s, watched.replicas, is_stepped=True),
                    Curve("Penstock, decided", VERMILION, shadow.at_s, shadow.replicas, is_stepped=True),
                ],
                span,
            )
        )
    if made is not None:
        curves = [
            Curve(
                "Penstock, predicted", VERMILION, *simulated_shares(made.window, report.slo, made.shadow_run)
            )
        ]
        seen = observed_shares(made.window, report.slo)
        if seen is not None:
            curves.insert(0, Curve("autoscaler, measured", BLUE, *seen))
        goal = 100 * report.slo.attainment
        made_of.append(figure("In time, %", curves, made.window, goal=goal, is_share=True))
    return made_of


def write_page(report: ShadowReport, folder: Path) -> Path:
    """Write the page and return its path.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    file = folder / PAGE_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(render_page(report), encoding="utf-8")
    except OSError as exc:
        raise ConfigError(unwritable(f"--output {folder}", exc)) from exc
    return file
