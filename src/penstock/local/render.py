"""The status as a table for a terminal; `penstock status`, `up`, `down` and the demo show it."""

from __future__ import annotations

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from penstock.local.process_problems import process_problems
from penstock.local.status import DecisionStatus, LocalGraphStatus, PlannerView, ProcessStatus

_STYLES = {
    "ready": "green",
    "starting": "yellow",
    "requested": "yellow",
    "draining": "cyan",
    "unhealthy": "red",
    "unregistered": "red",
    "circuit_open": "red",
    "failed": "bold red",
}
_TIMES = ", times are simulated seconds"
_LATE_S = 1.0
"""Simulated seconds of p99 lag from which a process is shown as late. Chosen: one metric pull."""


def render(status: LocalGraphStatus) -> RenderableType:
    """Return one screenful: headline, processes, pools with GPUs and queue, last decisions."""
    parts: list[RenderableType] = [_headline(status), _processes(status), *_reasons(status), _summary(status)]
    if status.pool:
        parts.append(Text(status.pool))
    if status.cut:
        parts.append(Text(status.cut, style="yellow"))
    if (traffic := status.traffic) is not None:
        style = "bold red" if traffic.rejected else ""
        parts.append(Text(f"last {traffic.period_s:.0f} s: {traffic}", style=style))
    if (transfers := status.kv_transfers) is not None and transfers.total:
        style = "bold red" if transfers.problem() else ""
        parts.append(Text(f"KV transfers since the router started: {transfers}", style=style))
    parts += [
        Text(each.message, style="bold red" if each.is_broken else "yellow")
        for each in process_problems(status)
    ]
    if status.decisions:
        parts.append(_decisions(status.decisions))
    return Group(*parts)


def _headline(status: LocalGraphStatus) -> Text:
    text = Text()
    text.append(status.namespace, style="bold")
    text.append(
        f"  {status.model}  {status.router_url}  speed {status.speed:g}{_TIMES if status.speed != 1 else ''}"
    )
    if not status.running:
        text.append("  arbiter is gone; unless it is back in seconds, run `penstock down`", style="bold red")
    elif status.stopping:
        text.append("  stopping", style="cyan")
    return text


def _processes(status: LocalGraphStatus) -> Table:
    """On a narrow terminal names are folded; figures and states are never cut."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    has_restarts = any(process.restarts for process in status.processes)
    table.add_column("process", overflow="fold")
    for title in ("state", "GPUs"):
        table.add_column(title, no_wrap=True)
    for title in ("requests", "tokens", "KV"):
        table.add_column(title, justify="right", no_wrap=True)
    if has_restarts:
        table.add_column("restarts", justify="right", no_wrap=True)
    for process in status.processes:
        cells = _cells(process)
        cells += [str(process.restarts or "")] if has_restarts else []
        table.add_row(*cells)
    return table


def _reasons(status: LocalGraphStatus) -> list[Text]:
    lines = [
        Text.assemble((f"{process.name}: ", "bold"), process.reason)
        for process in status.processes
        if process.reason
    ]
    return [*lines, Text("")] if lines else []


def _cells(process: ProcessStatus) -> list[RenderableType]:
    return [
        process.name,
        Text(process.state, style=_STYLES.get(process.state, "")),
        ",".join(str(gpu) for gpu in process.gpus),
        _number(process.inflight_requests),
        _number(process.inflight_tokens),
        _bar(process.kv_usage_fraction),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _bar(fraction: float | None, width: int = 8) -> Text:
    if fraction is None:
        return Text("")
    full = round(max(0.0, min(1.0, fraction)) * width)
    style = "red" if fraction > 0.9 else "green"
    return Text.assemble(("█" * full, style), ("░" * (width - full), "dim"), f" {fraction:4.0%}")


def _summary(status: LocalGraphStatus) -> Text:
    text = Text()
    for pool in status.pools:
        extra = f" +{pool.draining} draining" if pool.draining else ""
        failed = f" {pool.failed} failed" if pool.failed else ""
        text.append(f"{pool.role} {pool.ready}/{pool.desired}{extra}{failed}   ")
    text.append(f"GPUs {status.gpus_used}/{status.gpu_budget}", style="bold")
    if status.queue is not None:
        text.append(f"   prefill queue {status.queue.requests}")
        if status.queue.requests:
            text.append(f" (oldest {status.queue.oldest_s:.1f} s)")
    if status.planner is not None:
        _add_planner(text, status.planner)
    for name, lag_s in status.lag_p99_s.items():
        late = lag_s >= _LATE_S
        text.append(f"   {name} lag p99 {lag_s:.3f} s", style="bold yellow" if late else "dim")
    if status.planner is not None and status.planner.memory:
        text.append(f"\n{status.planner.memory}", style="dim")
    return text


def _add_planner(text: Text, planner: PlannerView) -> None:
    """Add what the planner does; of one that is silent, that alone: what it wrote last is over."""
    if planner.silent_real_s is not None:
        text.append(f"   planner silent for {planner.silent_real_s:,.0f} s (real)", style="bold red")
    else:
        text.append(f"   planner {planner.phase}")
        if planner.next_decision_s is not None:
            text.append(f" (decides in {planner.next_decision_s:.0f} s)")
    if planner.scheduled:
        text.append(f"   schedule {'; '.join(planner.scheduled)}")
    if planner.served is not None:
        served, predicted = planner.served
        text.append(f", served {served:.1%} in time (predicted {predicted:.1%})")


def _decisions(decisions: tuple[DecisionStatus, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title="last decisions", title_justify="left")
    table.add_column("at", justify="right", no_wrap=True)
    table.add_column("id", style="dim", no_wrap=True)
    table.add_column("decision", overflow="fold")
    table.add_column("reason", style="dim", no_wrap=True)
    for decision in reversed(decisions):
        style = "" if decision.current == decision.desired else "bold"
        table.add_row(
            f"{decision.at_s:,.0f} s", decision.id, Text(decision.sentence, style=style), decision.reason
        )
    return table
