from __future__ import annotations

import pytest

from penstock.api import GraphDeployment
from penstock.api.manifests.messages import suggestion
from penstock.api.manifests.validation import validate


def message_of(spec_change):
    """The one message that a change of a valid spec gives."""
    services = {"w": {"role": "aggregated"}}
    spec = {"model": {"name": "m"}, "services": services, **spec_change}
    found, _ = validate(GraphDeployment, {"metadata": {"name": "g"}, "spec": spec})
    assert len(found) == 1
    return found[0][1]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            {"planner": {"maxGpuBudget": 0}},
            "0 is too small; it must be at least 1",
        ),
        (
            {"planner": {"decodeKvScaleUpThreshold": 1.5}},
            "1.5 is too large; it must be at most 1",
        ),
        (
            {"planner": {"maxGpuBudget": "8"}},
            '"8" where a whole number is needed; write one such as 8, without quotes or fraction',
        ),
        (
            {"planner": {"adjustmentIntervalSeconds": "30s"}},
            '"30s" where a number is needed; write one such as 0.5, without quotes',
        ),
        (
            {"planner": {"adjustmentIntervalSeconds": float("inf")}},
            "Infinity is not finite; write an ordinary number",
        ),
        ({"planner": None}, "nothing where a map of keys is needed; indent its keys below it, or remove it for the defaults"),
        ({"nodePools": ["a"]}, "a list where a map of keys is needed; indent its keys below it, or remove it for the defaults"),
        ({"env": {"A": "b"}}, "a map where a list is needed; write each item on a line that starts with a hyphen"),
        ({"image": ["a"]}, "a list where text is needed; write text"),
        ({"image": False}, "false where text is needed; put it in quotes"),
        ({"image": ""}, '"" is too short, at least 1 is needed; write it out'),
        (
            {"runtime": "vlm"},
            '"vlm" is not one of vllm, dynamo, simulated; did you mean vllm?',
        ),
        (
            {"runtime": "tensorrt"},
            '"tensorrt" is not one of vllm, dynamo, simulated; choose one of them, or install the package that adds it',
        ),
        ({"planner": {"sla": {"predictor": "kalman"}}}, '"kalman": a model fitted to past demand saved no GPU-hours over constant on any measured load; use trend, or constant where demand has no slope'),
        ({"sevices": {}}, "unknown key; did you mean services?"),
        ({"prometheusUrl": "x"}, "unknown key here; it belongs at spec.planner.metrics.prometheusUrl"),
        ({"lease": {"zzz": 1}}, "unknown key; remove it (known here: durationSeconds, decoderBlocksTtlSeconds, acknowledgeShortLease)"),
        ({"model": {}}, "missing: Hugging Face id or path of the model; immutable; add it"),
    ],
)  # fmt: skip
def test_messages_name_value_bound_and_remedy(change, expected):
    """Each kind of mistake is told in one sentence that says what to do."""
    assert message_of(change) == expected


@pytest.mark.parametrize(
    ("word", "expected"),
    [("max_gpu_budget", "maxGpuBudget"), ("MAXGPUBUDGET", "maxGpuBudget"), ("budget", None), ("", None)],
)
def test_suggestions_ignore_case_and_separators(word, expected):
    """Only a near miss is suggested."""
    assert suggestion(word, ["maxGpuBudget", "minReplicas"]) == expected
