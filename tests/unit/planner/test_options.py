from __future__ import annotations

import pytest
from sla_load import FEW_POINTS

from penstock.api import Role
from penstock.api.manifests import load_graph
from penstock.api.planner import PlannerConfig
from penstock.core.errors import InvalidSpecError
from penstock_planner.decide.config import Mode
from penstock_planner.options import SETTINGS, PlannerOptions, join

GRAPH = """\
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: llama}
spec:
  model: {name: meta-llama/Llama-3.1-8B-Instruct, servedName: llama}
  runtime: simulated
  services:
    frontend: {role: router}
    prefill: {role: prefill, gpusPerReplica: 1, scaling: {minReplicas: 1, maxReplicas: 4}}
    decode: {role: decode, gpusPerReplica: 2, scaling: {minReplicas: 2, maxReplicas: 3}, replicas: 2}
  planner:
    maxGpuBudget: null
    adjustmentIntervalSeconds: 20
    newDecodeWorkerGraceIntervals: 5
    metrics: {maxAgeSeconds: 7}
"""


def _problems(excinfo):
    return [str(problem) for problem in excinfo.value.problems]


def test_every_setting_of_a_graphs_planner_has_one_declaration():
    """What ``spec.planner`` declares is an option with its bounds, default and help, or known to be none."""
    without_option = {
        "enabled",
        "new_decode_worker_grace_intervals",
        "new_prefill_worker_queue_buffer_intervals",
        "policy_parameters",
        "schedule",
    }
    declared = {setting.key.split(".")[0] for setting in SETTINGS.values()}
    assert set(PlannerConfig.model_fields) - declared == without_option
    for name in ("adjustment_interval", "min_gpu_budget", "max_step", "prefill_queue_scale_up_threshold"):
        of_graph = PlannerConfig.model_fields[SETTINGS[name].key]
        option = PlannerOptions.model_fields[name]
        assert (option.default, option.description) == (of_graph.default, of_graph.description)


def test_flags_beat_the_file_and_the_file_beats_the_graph(tmp_path):
    """Each layer only fills in what those above leave open; other components' sections of the file are not read."""
    file = tmp_path / "planner.yaml"
    file.write_text("Frontend: {port: 8000}\nPlanner:\n  adjustment-interval: 60\n  min-gpu-budget: 2\n")
    graph = load_graph(GRAPH)
    options = join(given={"adjustment-interval": "90"}, file=file, graph=graph)
    assert (options.adjustment_interval, options.min_gpu_budget) == (90.0, 2)
    assert join(given={}, file=file, graph=graph).adjustment_interval == 60.0
    assert join(given={}, graph=graph).adjustment_interval == 20.0


def test_a_graph_may_name_a_prometheus_behind_https():
    """What the manifest accepts the planner does, too."""
    url = "https://prometheus.example:9090"
    graph = load_graph(GRAPH.replace("maxAgeSeconds: 7", f"source: prometheus, prometheusUrl: '{url}'"))

    assert join(given={}, graph=graph).prometheus_url == url


def test_a_graph_gives_names_gpus_bounds_and_rules():
    """What the manifest says need not be said twice."""
    graph = load_graph(GRAPH)
    options = join(given={}, graph=graph)
    assert (options.namespace, options.served_model_name) == ("llama", "llama")
    assert (options.decode_engine_num_gpu, options.prefill_engine_num_gpu) == (2, 1)
    assert (options.max_gpu_budget, options.metrics_max_age, options.adjustment_deadline) == (
        None,
        7.0,
        600.0,
    )
    config = options.decide_config(graph)
    assert config.min_replicas == {Role.PREFILL: 1, Role.DECODE: 2}
    assert config.max_replicas == {Role.PREFILL: 4, Role.DECODE: 3}
    assert config.decode_grace_intervals == 5


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (
            {"decode-kv-scale-up-threshold": "0.4"},
            "--decode-kv-scale-down-threshold: 0.5 is not below --decode-kv-scale-up-threshold 0.4",
        ),
        (
            {"prefill-queue-scale-down-threshold": "0.5"},
            "--prefill-queue-scale-down-threshold: 0.5 is not below --prefill-queue-scale-up-threshold 0.5",
        ),
        (
            {"metric-pulling-interval": "31"},
            "--metric-pulling-interval: 31 s exceeds --adjustment-interval 30 s; pull at least once",
        ),
        (
            {"max-gpu-budget": "5", "min-gpu-budget": "3", "decode-engine-num-gpu": "2"},
            "--max-gpu-budget: 5 is below the floor of 4 for decode + 3 for prefill",
        ),
        ({"max-gpu-budget": "1"}, "--max-gpu-budget: 1 is below the floor of 1 for decode + 1 for prefill"),
        ({"metrics-source": "prometheus"}, "--prometheus-url: null, yet --metrics-source is prometheus"),
        (
            {"min-gpu-budget": "9"},
            "--min-gpu-budget: 9 exceeds --max-gpu-budget 8; lower it or raise --max-gpu-budget",
        ),
        ({"max-step": "1001"}, "--max-step: '1001': input should be less than or equal to 1000"),
        ({"decode-engine-num-gpu": "513"}, "--decode-engine-num-gpu: '513': input should be less"),
        (
            {"decode-kv-scale-up-threshold": "1.5"},
            "--decode-kv-scale-up-threshold: '1.5': input should be less",
        ),
        ({"adjustment-interval": "nan"}, "--adjustment-interval: 'nan': input should be a finite number"),
        (
            {"adjustment-interval": "0"},
            "--adjustment-interval: '0': input should be greater than or equal to 1",
        ),
        ({"max-gpu-budget": "many"}, "--max-gpu-budget: 'many': input should be a valid integer"),
        ({"ttft-slo": "5000"}, '--ttft-slo: "5000" is not a duration; write 5s or 5000ms'),
        (
            {"in-time": "0.9"},
            "Planner.in-time: no longer an option; write --attainment, a fraction such as 0.99",
        ),
        ({"environment": "moon"}, "--environment: 'moon': input should be 'local' or 'kubernetes'"),
        ({"router-url": "ftp://x"}, "--router-url: 'ftp://x': string should match"),
    ],
)
def test_wrong_options_name_key_value_and_remedy(given, problem):
    """One clear line each."""
    with pytest.raises(InvalidSpecError) as excinfo:
        join(given=given)
    assert len(_problems(excinfo)) == 1
    assert problem in _problems(excinfo)[0]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Planner: [1", "not YAML"),
        ("Frontend: {}\n", "no section 'Planner'"),
        ("- 1\n", "no section 'Planner'"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path, text, problem):
    """With the file's name and what to write."""
    file = tmp_path / "planner.yaml"
    file.write_text(text)
    with pytest.raises(InvalidSpecError, match=problem):
        join(given={}, file=file)


@pytest.mark.parametrize("mode", ["adaptive", "load"])
def test_mode_step_and_slo_come_from_the_graph(mode):
    """The decision gets all three; a flag wins."""
    text = GRAPH.replace(
        "    maxGpuBudget: null", f"    mode: {mode}\n    maxStep: 3\n    maxGpuBudget: null"
    )
    graph = load_graph(text.replace("spec:\n", "spec:\n  slo: {ttft: 1500ms}\n", 1))
    config = join(given={}, graph=graph).decide_config(graph)
    assert (config.mode, config.max_step, config.ttft_slo_s) == (mode, 3, 1.5)
    assert not config.queue_per_worker
    per_worker = join(given={"prefill-queue-per-worker": "true"}, graph=graph).decide_config(graph)
    assert per_worker.queue_per_worker
    given = {"mode": "load", "max-step": 2, "ttft-slo": "500ms"}
    config = join(given=given, graph=graph).decide_config(graph)
    assert (config.mode, config.max_step, config.ttft_slo_s) == (Mode.LOAD, 2, 0.5)


def test_every_mode_takes_its_targets_from_the_graph_and_mode_sla_its_profile_as_given():
    """Those of spec.slo; a flag wins; the profile is left out of the other modes."""
    text = GRAPH.replace("spec:\n", "spec:\n  slo: {ttft: 300ms, itl: 20ms, attainment: 0.95}\n", 1)
    graph = load_graph(text.replace("    maxGpuBudget: null", "    mode: sla\n    maxGpuBudget: null"))
    config = join(given={}, graph=graph).decide_config(graph, FEW_POINTS)
    assert (config.mode, config.ttft_slo_s, config.itl_slo_s, config.attainment) == (
        Mode.SLA,
        0.3,
        0.02,
        0.95,
    )
    assert config.performance is FEW_POINTS
    flagged = join(given={"ttft-slo": "400ms", "itl-slo": "none", "attainment": 0.9}, graph=graph)
    assert (flagged.ttft_slo, flagged.itl_slo, flagged.attainment) == (0.4, None, 0.9)
    other = join(given={"mode": "adaptive"}, graph=graph).decide_config(graph, FEW_POINTS)
    assert (other.ttft_slo_s, other.itl_slo_s, other.in_time, other.performance) == (0.3, 0.02, 0.95, None)


def test_scaling_to_zero_is_the_graphs_to_say_and_the_flags_to_change(tmp_path):
    """Its router and its services are set up for it; any other's would refuse the request that should wake it."""
    with pytest.raises(InvalidSpecError) as excinfo:
        join(given={"scale-to-zero-after": 60, "mode": "adaptive", "min-gpu-budget": 0})
    assert "no graph sets planner.scaleToZeroAfterSeconds" in _problems(excinfo)[0]
    path = tmp_path / "zero.yaml"
    path.write_text(
        GRAPH.replace("minReplicas: 1", "minReplicas: 0")
        .replace("minReplicas: 2", "minReplicas: 0")
        .replace("  planner:\n", "  router: {prefillQueue: {maxWakeSeconds: 300}}\n  planner:\n")
        .replace(
            "maxGpuBudget: null", "maxGpuBudget: null\n    minGpuBudget: 0\n    scaleToZeroAfterSeconds: 600"
        )
    )
    graph = load_graph(path)
    assert join(given={}, graph=graph).decide_config(graph).scale_to_zero_after_s == 600
    assert join(given={"scale-to-zero-after": 60}, graph=graph).scale_to_zero_after == 60
    assert join(given={"scale-to-zero-after": "none"}, graph=graph).scale_to_zero_after is None
    with pytest.raises(InvalidSpecError) as excinfo:
        join(given={"mode": "load"}, graph=graph)
    assert "mode load has no signal" in " ".join(_problems(excinfo))


def test_start_ups_come_from_the_services():
    """What prefill states, and the longest that either is waited for."""
    text = GRAPH.replace("{role: prefill,", "{role: prefill, startupSeconds: 90,").replace(
        "{role: decode,", "{role: decode, startupTimeoutSeconds: 900,"
    )
    graph = load_graph(text)
    config = join(given={}, graph=graph).decide_config(graph)
    assert (config.startups_s, config.startup_timeout_s) == ({Role.PREFILL: 90.0}, 900.0)
