"""Progress of a ProfileRequest: computes its phase, its condition and its recommendation from the observed Job and pods.

Pure functions. A final phase never changes, because the Job's pods, and with them their messages, are deleted later.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from penstock.api import ProfilePhase
from penstock.kube.objects.names import GRAPH_KEY, PROFILE_KEY, SUMMARY_KEY
from penstock_operator.plan.diagnose import diagnose, worst
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.status import ConditionResult, conditions

COMPLETE: Final = "Complete"
"""Type of a ProfileRequest's only condition."""

LAST_MESSAGE_LINES: Final = 800
"""Maximum number of characters of a failed pod's last output in a condition. Chosen: enough for the last error with
its remedy."""

SUMMARY_LINES, LINE_CHARS = 16, 400
"""Maximum number of summary lines in a status, and maximum characters per line. Chosen: four lines, and one more for
each missed target."""

_PROFILING: Final = "Profiling"
_SIZE: Final = re.compile(r"Suggested (?P<role>prefill|decode) TP:(?P<size>\d{1,3}) ")
"""Matches the output line of `penstock profile` that names the best size, in the format of Dynamo's planner
documentation."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Progress of a ProfileRequest.

    Attributes:
        phase: Phase of the request.
        reason: Reason of the request's condition ``Complete``.
        message: Message of that condition.
        recommendation: Value of ``status.recommendation``; None until the request has succeeded.
    """

    phase: ProfilePhase
    reason: str
    message: str
    recommendation: Mapping[str, Any] | None = None


def ended(job: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the condition with which a Job completed or failed; None if it has not ended."""
    for each in (job.get("status") or {}).get("conditions") or ():
        if each.get("type") in {"Complete", "Failed"} and each.get("status") == "True":
            found: Mapping[str, Any] = each
            return found
    return None


def outcome(
    job: Mapping[str, Any],
    pods: Sequence[PodView],
    result: Mapping[str, str] | None,
    config_map: str,
    *,
    now_s: float,
) -> Outcome:
    """Return the progress of a ProfileRequest whose Job exists: phase, condition and recommended settings.

    Args:
        job: The Job.
        pods: The Job's pods.
        result: Data of the ConfigMap into which the Job writes its result; None if that ConfigMap does not exist.
        config_map: Name of that ConfigMap.
        now_s: Current Unix time in seconds.
    """
    end = ended(job)
    if end is None:
        return _in_progress(job, pods, now_s)
    if end["type"] == "Failed":
        return _failed(job["metadata"]["name"], pods, end)
    if result is None or PROFILE_KEY not in result:
        message = (
            f"the Job ended, but ConfigMap {config_map} holds no {PROFILE_KEY}; "
            "delete the request and apply it again"
        )
        return Outcome(ProfilePhase.FAILED, "ResultMissing", message)
    found = recommendation(result)
    summary = "; ".join(found.get("summary", ()))
    message = f"ConfigMap {config_map} holds the profile. {summary}".rstrip()
    # If the result has no graph to apply, a target was missed; the last lines name it and what meeting it needs.
    reason = "Profiled" if GRAPH_KEY in result else "TargetsMissed"
    return Outcome(ProfilePhase.SUCCEEDED, reason, message, found)


def recommendation(result: Mapping[str, str]) -> dict[str, Any]:
    """Return ``status.recommendation`` from ``result``, the data of the ConfigMap with a Job's result; empty if it has no summary."""
    lines = (line for line in result.get(SUMMARY_KEY, "").splitlines() if line.strip())
    summary = [line[:LINE_CHARS] for line in islice(lines, SUMMARY_LINES)]
    found = [match for line in summary if (match := _SIZE.match(line))]
    sizes = {f"{match['role']}TensorParallel": int(match["size"]) for match in found}
    return {**sizes, "summary": summary} if summary else {}


def request_status(
    found: Outcome,
    *,
    generation: int,
    job: Mapping[str, Any] | None,
    config_map: str,
    old: Mapping[str, Any],
    now: str,
) -> dict[str, Any]:
    """Return the status of a ProfileRequest, for server-side apply.

    Args:
        found: Progress of the request, such as from `outcome`.
        generation: ``metadata.generation`` that the progress applies to.
        job: The Job; None if it does not exist yet.
        config_map: Name of the ConfigMap into which the Job writes its result.
        old: Current status of the request.
        now: RFC 3339 time; used only if the condition's status changes.
    """
    is_done = found.phase is ProfilePhase.SUCCEEDED
    condition = ConditionResult(COMPLETE, status=is_done, reason=found.reason, message=found.message)
    status: dict[str, Any] = {
        "observedGeneration": generation,
        "phase": found.phase.value,
        "conditions": conditions(
            [condition], old=old.get("conditions") or (), generation=generation, now=now
        ),
    }
    if job is not None:
        status["job"] = job["metadata"]["name"]
        status |= _times(job, found.phase)
    if is_done:
        status["configMap"] = config_map
    if found.recommendation:
        status["recommendation"] = dict(found.recommendation)
    return status


def _times(job: Mapping[str, Any], phase: ProfilePhase) -> dict[str, str]:
    job_status = job.get("status") or {}
    times = {"startTime": job_status["startTime"]} if job_status.get("startTime") else {}
    end = ended(job)
    at = job_status.get("completionTime") or (end or {}).get("lastTransitionTime")
    return {**times, "completionTime": at} if phase.is_final and at else times


def _in_progress(job: Mapping[str, Any], pods: Sequence[PodView], now_s: float) -> Outcome:
    name = job["metadata"]["name"]
    found = [each for pod in pods if (each := diagnose(pod, now_s=now_s)) is not None and not pod.finished]
    problem = worst(found)
    if problem is not None:
        return Outcome(ProfilePhase.PROFILING, problem.category.value, str(problem))
    failed = (job.get("status") or {}).get("failed") or 0
    if failed:
        last = last_message(pods)
        message = f"Job {name} tries again after {failed} failed {'try' if failed == 1 else 'tries'}: {last}"
        return Outcome(ProfilePhase.PROFILING, "Retrying", message)
    if any(pod.ready or any(each.running_since_s for each in pod.containers) for pod in pods):
        return Outcome(
            ProfilePhase.PROFILING, _PROFILING, f"Job {name} is measuring; see kubectl logs job/{name}"
        )
    return Outcome(ProfilePhase.PROFILING, "Starting", f"Job {name} is starting its pod")


def _failed(name: str, pods: Sequence[PodView], end: Mapping[str, Any]) -> Outcome:
    reason, last = str(end.get("reason") or "Failed"), last_message(pods)
    is_late = reason == "DeadlineExceeded"
    remedy = "raise timeoutSeconds, or measure fewer sizes" if is_late else "correct the reported problem"
    message = f"Job {name}: {end.get('message') or reason}. {last}; {remedy}, then delete the request and apply it again"
    return Outcome(ProfilePhase.FAILED, reason, message)


def last_message(pods: Sequence[PodView]) -> str:
    """Return the last output and exit code of the container of a Job that failed last, or a text that says that none failed.

    ``pods`` are the pods of the Job.
    """
    exits = [
        (each.last_exit.at_s or 0.0, each.last_exit)
        for pod in pods
        for each in pod.containers
        if each.last_exit is not None and each.last_exit.code != 0
    ]
    if not exits:
        return "no failed pod of the Job exists any more"
    newest = max(exits, key=lambda each: each[0])[1]
    if newest.reason == "OOMKilled":
        return "its container was OOMKilled; raise its limit in podTemplate"
    lines = " ".join(newest.message.split())
    return (
        f"it ended with exit code {newest.code}: {lines[-LAST_MESSAGE_LINES:]}"
        if lines
        else f"exit code {newest.code}"
    )
