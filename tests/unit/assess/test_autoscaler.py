"""The HPA that kube-state-metrics describes, and the fleet that it scales."""

from __future__ import annotations

import pytest
from observed_fleets import observed

from penstock.api import Role, SloConfig
from penstock.assess.autoscaler import Autoscaler, autoscaler_of, signal_of
from penstock.assess.fleets import HPA_COMMON, Setting, _autoscaled
from penstock.workload.traces import trace_of_rows
from penstock_planner.decide.policies.baselines.hpa import HpaParameters

PREFIX = "kube_horizontalpodautoscaler_spec"


def series(low, high, **targets):
    """What kube-state-metrics exports of an HPA."""
    found = [({"__name__": f"{PREFIX}_min_replicas"}, low), ({"__name__": f"{PREFIX}_max_replicas"}, high)]
    for metric, value in targets.items():
        labels = {
            "__name__": f"{PREFIX}_target_metric",
            "metric_name": metric,
            "metric_target_type": "average",
        }
        found.append((labels, value))
    return found


@pytest.mark.parametrize(
    ("metric", "signal"),
    [
        ("vllm:kv_cache_usage_perc", "kv_usage"),
        ("vllm_gpu_cache_usage_perc", "kv_usage"),
        ("vllm:num_requests_waiting", "waiting"),
        ("penstock_router_unserved_requests", "waiting"),
        ("vllm-num-requests-running", "running"),
        ("tgi_queue_size", "waiting"),
        ("cpu", None),
        ("s0-prometheus", None),
    ],
)
def test_the_name_of_a_metric_says_what_is_simulated(metric, signal):
    """Adapters rename series; the words stay."""
    assert signal_of(metric) == signal


def test_targets_and_bounds_are_those_that_were_configured():
    """A target in percent becomes a fraction; what cannot be simulated is named."""
    found = autoscaler_of(
        "web", series(2.0, 8.0, num_requests_waiting=5.0, kv_cache_usage_perc=80.0, cpu=70.0)
    )
    assert found == Autoscaler("web", 2, 8, HpaParameters(kv_usage=0.8, waiting=5.0), ("cpu",))
    assert found.words == "KV usage 80%, 5 waiting, 2 to 8 replicas"
    assert found.note == "the HPA web scales on cpu as well, which is not simulated"


def test_an_hpa_on_other_metrics_alone_has_common_settings_within_its_own_bounds():
    """The note says so."""
    found = autoscaler_of("keda-hpa-web", series(1.0, 4.0, **{"s0-prometheus": 5.0}))
    assert found.targets is None
    assert "scales on s0-prometheus, which is not simulated; the HPA has common settings" in found.note


@pytest.mark.parametrize(
    ("known", "name", "targets", "bounds"),
    [
        (None, HPA_COMMON, HpaParameters(), (1, 4)),
        (Autoscaler("web", 2, 6, HpaParameters(None, 5.0)), "HPA as configured: 5 waiting, 2 to 6 replicas", HpaParameters(None, 5.0), (2, 6)),
        (Autoscaler("web", 3, 3, None, ("cpu",)), HPA_COMMON, HpaParameters(), (3, 3)),
    ],
)  # fmt: skip
def test_the_simulated_hpa_is_the_configured_one(known, name, targets, bounds):
    """Its bounds hold even above the budget of the other fleets."""
    trace = trace_of_rows([{"arrival_s": 0.0, "input_tokens": 10, "output_tokens": 5}])
    setting = Setting(
        observed([10] * 3, autoscaler=known), (trace,), "h100-llama-8b-bf16-tp1", SloConfig(), 1, 60.0, 4
    )
    (label, _, (spec,)), (_, _, (keda,)) = _autoscaled(setting)
    assert label == name
    planner = spec.scenario.planner
    assert (planner.mode, planner.parameters) == ("hpa", targets)
    (pool,) = spec.scenario.pools
    assert pool.role is Role.AGGREGATED
    assert (planner.min_replicas[Role.AGGREGATED], planner.max_replicas[Role.AGGREGATED]) == bounds
    assert keda.scenario.planner.mode == "keda"
    assert keda.scenario.planner.parameters.prefill_tokens_per_s > 0
