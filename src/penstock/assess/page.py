"""Writes an assessment as one self-contained HTML page, and the files that its recommendation needs."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from penstock.api.manifests.yaml_text import as_yaml
from penstock.assess.assessment import Assessment
from penstock.assess.charts import charts
from penstock.assess.manifest import GRAPH_FILE
from penstock.assess.text import (
    CALIBRATION_HEADS,
    calibration_rows,
    calibration_sentence,
    facts,
    fleet_heads,
    fleet_rows,
)
from penstock.core.durations import duration_text
from penstock.core.errors import ConfigError, unwritable
from penstock.report.html_parts import page, pairs, table, text

PAGE_FILE: Final = "assessment.html"
MEMORY_FILE: Final = "memory.json"

_FLEETS_NOTE: Final = (
    "Simulated, in virtual time. In parentheses: lowest and highest over the seeds. In time: the first token, and where a target"
    " is given the mean time between a request's tokens. GPU-hours count from the request for a replica. The fixed fleet is the"
    " smallest that reaches the target; the tuned HPA the cheapest of six that does."
)
_CHARTS_NOTE: Final = "The simulated window, in UTC. In time counts the first token; the dashed line is the target. The recommended fleet is drawn if there is one."
_ROUTER_STEP: Final = (
    "Put the router alone in front of the workers that run today: {router}, with one --worker for each. It changes nothing on"
    " them. To go back, point the clients at the workers again."
)
_WATCH_STEP: Final = (
    "Let the planner watch next to your HPA for a night: {watch}. It reads Prometheus alone, records what it would do and why, and"
    " scales nothing; penstock report --ledger shadow --output report then compares both fleets (docs/tutorial-shadow.md). To go back,"
    " stop it."
)
_MOVE_STEP: Final = (
    f"Set image, arguments and secrets in {GRAPH_FILE} as the Deployment has them, apply it next to the Deployment, and move a part"
    f" of the traffic. {MEMORY_FILE} is what its planner would have learnt of this load; penstock planner run --memory {MEMORY_FILE} starts from it."
    " To go back, move the traffic back and delete the graph."
)
_CARRIES: Final = (
    "Floors and ceilings are those of the simulation: the replicas that it had in all but its quietest twentieth, and its peak with a quarter"
    " more. {schedule} router.admission.activePrefillTokensThreshold is what one replica computes within two TTFT targets; it takes effect"
    " when you set router.admission.mode: token-capacity, which turns away requests that would be late."
)


_SCHEDULED: Final = (
    "The schedule raises the floors for the busy hours of the day, and begins a start earlier."
)
_UNSCHEDULED: Final = (
    "There is no schedule: it needs two days of history and a clear daily shape that asks for higher floors."
)


def render_page(found: Assessment) -> str:
    """Return the page, with the result in its first sentence."""
    recommended = found.recommendation
    parts = [
        f"<h1>{text(f'What would Penstock save for {found.observed.model}?')}</h1>",
        f'<p class="result">{text(recommended.sentence)}</p>',
        *(f'<p class="mark bad">{text(reason)}</p>' for reason in recommended.reasons),
        *(f'<p class="mark">{text(note)}</p>' for note in found.observed.notes),
        "<h2>What was read and simulated</h2>",
        pairs(facts(found)),
        "<h2>The same load on other fleets</h2>",
        table(fleet_heads(found), fleet_rows(found)),
        f"<p>{text(_FLEETS_NOTE)}</p>",
        "<h2>Over time</h2>",
        f"<p>{text(_CHARTS_NOTE)}</p>",
        *charts(found.window, found.options.slo, found.recommended_run, found.ran_run),
    ]
    if found.calibration is not None:
        parts += [
            "<h2>How far the simulation can be trusted</h2>",
            f"<p>{text(calibration_sentence(found.calibration))}</p>",
            table(CALIBRATION_HEADS, calibration_rows(found.calibration, with_hours=False)),
            "<details><summary>By hour</summary>",
            table(CALIBRATION_HEADS, calibration_rows(found.calibration, with_hours=True)),
            "</details>",
        ]
    parts += ["<h2>First step, and the way back</h2>", *_steps(found)]
    return page(f"Penstock assessment: {found.observed.model}", parts)


def _steps(found: Assessment) -> list[str]:
    if found.recommendation.plan is None:
        return ["<p>Nothing is recommended, so there is no step to take.</p>"]
    router = f"penstock router serve --model {found.observed.model} --worker aggregated=http://HOST:PORT"
    steps = (_WATCH_STEP.format(watch=_watch(found)), _ROUTER_STEP.format(router=router), _MOVE_STEP)
    items = "".join(f"<li>{text(step)}</li>" for step in steps)
    manifest = as_yaml([found.recommendation.plan.manifest()])
    carries = _CARRIES.format(schedule=_SCHEDULED if found.recommendation.plan.schedule else _UNSCHEDULED)
    return [
        f"<ol>{items}</ol>",
        f"<h3>{GRAPH_FILE}</h3>",
        f"<p>{text(carries)}</p>",
        f"<pre>{text(manifest)}</pre>",
    ]


def _watch(found: Assessment) -> str:
    """Return the command that starts a shadow planner with the assessment's settings."""
    plan, options = found.recommendation.plan, found.options
    command = "penstock planner run --no-operation --shadow DEPLOYMENT --prometheus-url URL"
    if plan is not None and not plan.is_disaggregated:
        command += f" --graph {GRAPH_FILE} --memory {MEMORY_FILE}"
    else:  # the workers that run today are aggregated, so that such a graph has other roles
        command += f" --served-model-name {found.observed.model} --ttft-slo {duration_text(options.slo.ttft_seconds)}"
        command += "" if plan is None else f" --max-gpu-budget {plan.max_gpus}"
    return f"{command} --cold-start {duration_text(options.cold_start_s)} --log-dir shadow"


def write_files(found: Assessment, folder: Path) -> list[Path]:
    """Write the page, the recommended manifest and what its planner would have learnt, and return the files."""
    files = [folder / PAGE_FILE]
    try:
        files[0].write_text(render_page(found), encoding="utf-8")
        plan = found.recommendation.plan
        if plan is not None:
            files.append(folder / GRAPH_FILE)
            files[-1].write_text(as_yaml([plan.manifest()]), encoding="utf-8")
        if found.memory is not None:
            files.append(folder / MEMORY_FILE)
            files[-1].write_bytes(found.memory)
    except OSError as exc:
        raise ConfigError(unwritable(f"--output-dir {folder}", exc)) from exc
    return files
