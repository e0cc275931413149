"""What becomes of a ProfileRequest: phases, reasons, last words and the recommendation."""

from __future__ import annotations

import pytest

from penstock.api import ProfilePhase
from penstock_operator.plan.pods import pod_view
from penstock_operator.plan.profile import last_message, outcome, request_status

NOW_S = 1_000_000_000.0
LINES = (
    "Suggested prefill TP:4 (TTFT 48.37 ms, throughput 15505.23 tokens/s/GPU)\n"
    "Suggested planner upper/lower bound for prefill queue size: 0.24/0.10\n"
    "Suggested decode TP:2 (ITL 4.83 ms, throughput 51.22 tokens/s/GPU)\n"
    "Suggested planner upper/lower bound for decode kv cache utilization: 0.20/0.10\n"
)
RESULT = {"profile.json": "{}", "graph.yaml": "{}", "recommendation.txt": LINES}


def job(*conditions, **status):
    """A Job with its status."""
    found = [
        {"type": kind, "status": "True", "reason": reason, "message": "said"} for kind, reason in conditions
    ]
    return {"metadata": {"name": "fast-profile"}, "status": {"conditions": found, **status}}


def pod(state, phase="Running", **spec):
    """A pod of the Job."""
    status = {"name": "main", "state": state, "ready": phase == "Running"}
    return pod_view(
        {
            "metadata": {"name": "p", "creationTimestamp": "2001-09-09T01:46:30Z"},
            "spec": {"containers": [{"name": "main"}], **spec},
            "status": {"phase": phase, "containerStatuses": [status]},
        }
    )


def ended(code, message="", reason="Error", at="2001-09-09T01:46:40Z"):
    """A pod that has ended."""
    return pod(
        {"terminated": {"exitCode": code, "message": message, "reason": reason, "finishedAt": at}}, "Failed"
    )


def told(found_job, *pods, result=None):
    """Phase, reason and message."""
    found = outcome(found_job, pods, result, "kept", now_s=NOW_S)
    return found.phase, found.reason, found.message


def test_a_job_under_way():
    """It starts, runs, fails to start, tries again."""
    assert told(job()) == (ProfilePhase.PROFILING, "Starting", "Job fast-profile is starting its pod")
    running = pod({"running": {"startedAt": "2001-09-09T01:46:35Z"}}, nodeName="n")
    assert told(job(active=1), running)[1:] == (
        "Profiling",
        "Job fast-profile is measuring; see kubectl logs job/fast-profile",
    )
    pulling = pod(
        {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}, "Pending", nodeName="n"
    )
    phase, reason, message = told(job(active=1), pulling)
    assert (phase, reason) == (ProfilePhase.PROFILING, "ImagePull")
    assert "cannot be pulled" in message
    assert told(job(failed=1), ended(1, "boom"))[1:] == (
        "Retrying",
        "Job fast-profile tries again after 1 failed try: it ended with exit code 1: boom",
    )


@pytest.mark.parametrize(
    ("reason", "remedy"),
    [
        ("DeadlineExceeded", "raise timeoutSeconds, or measure fewer sizes"),
        ("BackoffLimitExceeded", "correct the reported problem"),
        ("SomethingNew", "correct the reported problem"),
    ],
)
def test_a_failed_job_says_why_and_what_to_do(reason, remedy):
    """The Job's reason, the pod's last lines, the remedy."""
    assert told(job(("Failed", reason)), ended(1, "a\nb")) == (
        ProfilePhase.FAILED,
        reason,
        f"Job fast-profile: said. it ended with exit code 1: a b; {remedy}, then delete the request and apply it again",
    )


def test_last_words_are_the_newest_pods():
    """Of several tries the last; what is said is cut from the front; nothing known is said too."""
    early, late = ended(1, "early", at="2001-09-09T01:00:00Z"), ended(1, "x" * 5000 + " the end")
    assert last_message([late, early]).endswith("the end")
    assert len(last_message([late])) < 900
    assert last_message([]) == "no failed pod of the Job exists any more"
    assert last_message([ended(137, reason="OOMKilled")]).startswith("its container was OOMKilled")
    assert last_message([ended(3)]) == "exit code 3"


def test_a_completed_job_with_its_result():
    """The ConfigMap, and the recommendation in the condition."""
    found = outcome(job(("Complete", "")), (), RESULT, "kept", now_s=NOW_S)
    assert (found.phase, found.reason) == (ProfilePhase.SUCCEEDED, "Profiled")
    assert found.message.startswith("ConfigMap kept holds the profile. Suggested prefill TP:4 (TTFT 48.37 ms")
    assert found.recommendation == {
        "prefillTensorParallel": 4,
        "decodeTensorParallel": 2,
        "summary": LINES.splitlines(),
    }


@pytest.mark.parametrize("result", [None, {}, {"recommendation.txt": LINES}])
def test_a_completed_job_without_a_profile_has_failed(result):
    """Deleted, or never filled."""
    assert told(job(("Complete", "")), result=result)[:2] == (ProfilePhase.FAILED, "ResultMissing")


def test_the_status_keeps_its_transition_time_and_tells_times_at_the_end():
    """CompletionTime only once it has ended; the ConfigMap only once it is filled."""
    running = outcome(job(startTime="S"), (), None, "kept", now_s=NOW_S)
    first = request_status(running, generation=1, job=job(startTime="S"), config_map="kept", old={}, now="T1")
    assert (first["startTime"], first["job"]) == ("S", "fast-profile")
    assert {"completionTime", "configMap"}.isdisjoint(first)
    end = job(("Complete", ""), startTime="S", completionTime="E")
    done = outcome(end, (), RESULT, "kept", now_s=NOW_S)
    last = request_status(done, generation=1, job=end, config_map="kept", old=first, now="T2")
    assert (last["completionTime"], last["configMap"], last["phase"]) == ("E", "kept", "Succeeded")
    assert [each["lastTransitionTime"] for each in (*first["conditions"], *last["conditions"])] == [
        "T1",
        "T2",
    ]
