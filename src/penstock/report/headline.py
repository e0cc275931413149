"""The report's headline, one sentence with the result of a run, and its title, which describes the load. Pure."""

from __future__ import annotations

from penstock.report.findings import RunReport

_MINUTE_S = 60.0


def headline(report: RunReport) -> str:
    """Return the result of the run: requests served, fraction on time, and GPU-hours compared with a fixed fleet.

    Unknown figures are left out. The TTFT target is that of the comparison with other fleets or, without a comparison, that of the report.
    """
    counts = report.load.summary["requests"]
    served = f"Served {counts['ok']:,} of {counts['planned']:,}"
    if report.load.summary["is_partial"]:
        served += " before it was stopped"
    return "; ".join(filter(None, (served, _in_time(report), _cost(report))))


def title(report: RunReport) -> str:
    """Return a description of the load: trace, number of requests, model and duration."""
    summary = report.load.summary
    trace, duration_s = summary["trace"], report.duration_s
    length = f"{duration_s:.0f} s" if duration_s < 2 * _MINUTE_S else f"{duration_s / _MINUTE_S:.0f} min"
    sent = f"{summary['requests']['planned']:,} requests to {summary['settings']['model']} in {length}"
    return f"{trace.get('title') or trace['name']}: {sent}"


def _in_time(report: RunReport) -> str:
    compared, missed = report.counterfactual, report.violations
    if compared is not None:
        share, target_s = compared.served.in_time, compared.slo_s
    elif missed.ttft_target_s is not None and missed.late_first_tokens is not None and missed.requests:
        share, target_s = 1 - missed.late_first_tokens / missed.requests, missed.ttft_target_s
    else:
        return ""
    # Only exactly all requests are shown as 100%: 1,999 of 2,000 would be rounded up.
    shown = share if share == 1 else min(share, 0.999)
    doubt = ", DISTORTED by lag" if report.lag["is_distorted"] else ""
    return f"{shown:.1%} in time (first token within {target_s:g} s{doubt})"


def _cost(report: RunReport) -> str:
    use, compared = report.use, report.counterfactual
    if use is None or not use.covers(report.duration_s):
        return ""
    spent = f"{_hours(use.used_hours)} GPU-hours"
    # A distorted run is compared by its simulation, to which the measured GPU-hours do not belong.
    if compared is not None and compared.fixed and not report.lag["is_distorted"]:
        equal = compared.equal
        if equal is not None and equal.gpu_hours:
            alongside = _beside(use.used_hours, equal.gpu_hours)
            return f"{spent}, {alongside} the cheapest fixed fleet that serves as well ({equal.name})"
        if equal is None and compared.is_complete:
            return f"{spent}; no fixed fleet that was tried serves as well"
    if use.budget_gpus is not None and use.static_max_hours > 0:
        alongside = _beside(use.used_hours, use.static_max_hours)
        return f"{spent}, {alongside} all {use.budget_gpus} GPUs all the time"
    return spent


def _hours(hours: float) -> str:
    return f"{hours:,.2f}" if hours >= 1 else f"{hours:.3f}"


def _beside(hours: float, other: float) -> str:
    percent = round(100 * (hours / other - 1))
    if percent == 0:
        return "as many as"
    return f"{-percent}% less than" if percent < 0 else f"{percent}% more than"
