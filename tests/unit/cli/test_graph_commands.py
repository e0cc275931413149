from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from penstock.api.manifests import load_graph
from penstock.cli.graph_warnings import cluster_warnings, machine_warnings
from penstock.cli.local import load_command
from penstock.cli.main import cli
from penstock.runtimes import RuntimeContext, filled_argv, process_specs

SAMPLES = Path(__file__).parents[3] / "manifests" / "samples"
DGD = """\
apiVersion: nvidia.com/v1alpha1
kind: DynamoGraphDeployment
metadata: {name: chat}
spec:
  services:
    Worker:
      componentType: worker
      dynamoNamespace: other
      extraPodSpec:
        mainContainer: {args: [--model, Q]}
"""


@pytest.fixture(name="dgd")
def deployment_file(tmp_path):
    """A file with the deployment, which a test may write otherwise."""
    file = tmp_path / "dgd.yaml"
    file.write_text(DGD)
    return file


def test_up_says_that_one_router_runs_on_a_machine(tmp_path):
    """Further replicas of the router, which a cluster starts, are named instead of left out in silence."""
    file = tmp_path / "graph.yaml"
    graph = yaml.safe_load((SAMPLES / "disaggregated.yaml").read_text())
    file.write_text(yaml.safe_dump(graph))
    assert list(machine_warnings(load_graph(file), file)) == []
    graph["spec"]["services"]["frontend"]["replicas"] = 2
    file.write_text(yaml.safe_dump(graph))
    (warning,) = machine_warnings(load_graph(file), file)
    assert warning.path == "spec.services.frontend.replicas"
    assert warning.message == "2, but on one machine only one router runs; a cluster starts all of them"


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({}, None),
        ({"replicas": 2}, None),
        ({"replicas": 1}, "replicas"),
        ({"scaling": {"minReplicas": 1, "maxReplicas": 1}}, "scaling.maxReplicas"),
        ({"replicas": 1, "scaling": {"minReplicas": 1, "maxReplicas": 2}}, None),
    ],
)
def test_a_single_router_is_named(tmp_path, changes, key):
    """It is away while its node is drained."""
    file = tmp_path / "graph.yaml"
    graph = yaml.safe_load((SAMPLES / "disaggregated.yaml").read_text())
    graph["spec"]["services"]["frontend"] |= changes
    file.write_text(yaml.safe_dump(graph))
    found = [each.path for each in cluster_warnings([load_graph(file)], file)]
    assert found == ([] if key is None else [f"spec.services.frontend.{key}"])


def test_keys_of_a_section_that_is_switched_off_are_named(run, tmp_path):
    """With the switch; a section without keys, and one that is on, are not."""
    file = tmp_path / "graph.yaml"
    graph = yaml.safe_load((SAMPLES / "disaggregated.yaml").read_text())
    admission = {"activePrefillTokensThreshold": 5, "retryAfterSeconds": 2}

    def said(**router):
        graph["spec"]["router"] = router
        file.write_text(yaml.safe_dump(graph))
        status, _, err = run("validate", file)
        assert status == 0
        return [line.partition("spec.router.")[2] for line in err.splitlines()]

    assert said(
        admission=admission, tiers={"enabled": False, "default": "premium"}, gateway={"port": 9002}
    ) == [
        "admission.activePrefillTokensThreshold: has no effect without router.admission.mode: token-capacity; set that, or remove it",
        "tiers.default: has no effect without router.tiers.enabled: true; set that, or remove it",
        "gateway.port: has no effect without router.gateway.enabled: true; set that, or remove it",
    ]
    assert (
        said(admission={**admission, "mode": "token-capacity"}, tiers={"enabled": True, "default": "premium"})
        == []
    )


def test_keys_of_another_mode_are_reported(run, tmp_path):
    """A key that the chosen mode does not decide by is named with the modes that do; the file stays valid."""
    file = tmp_path / "graph.yaml"
    graph = yaml.safe_load((SAMPLES / "disaggregated.yaml").read_text())
    graph["spec"]["planner"] = {
        "adjustmentIntervalSeconds": 30,
        "decodeKvScaleUpThreshold": 0.8,
        "maxStep": 2,
    }
    file.write_text(yaml.safe_dump(graph))
    status, out, err = run("validate", file)
    assert (status, out) == (0, f"{file}: valid (GraphDeployment llama)\n")
    assert [line.removeprefix(f"warning: {file}: spec.planner.") for line in err.splitlines()] == [
        "adjustmentIntervalSeconds: mode adaptive decides every 2 s regardless; remove it, or choose mode load",
        "decodeKvScaleUpThreshold: mode adaptive does not read it; remove it, or choose mode load",
    ]
    graph["spec"]["planner"] |= {"mode": "load", "sla": {"predictor": "constant"}}
    file.write_text(yaml.safe_dump(graph))
    assert [line.split(": ")[2:4] for line in run("validate", file)[2].splitlines()] == [
        ["spec.planner.maxStep", "mode load does not read it; remove it, or choose mode adaptive or sla"],
        ["spec.planner.sla", "mode load does not read it; remove it, or choose mode sla"],
    ]


def test_real_engines_are_asked_for_their_start_up(run, tmp_path):
    """Until the planner has observed a start it would take 30 s for it; a stated one, or another mode, ends the warning."""
    file = tmp_path / "graph.yaml"
    graph = yaml.safe_load((SAMPLES / "vllm-disaggregated.yaml").read_text())
    del graph["spec"]["services"]["decode"]["startupSeconds"]
    file.write_text(yaml.safe_dump(graph))
    status, _, err = run("validate", file)
    assert status == 0
    assert "spec.services.decode.startupSeconds: not set, so the planner assumes 30 s" in err
    assert "services.prefill" not in err
    graph["spec"]["planner"]["mode"] = "load"
    file.write_text(yaml.safe_dump(graph))
    assert "startupSeconds" not in run("validate", file)[2]


def test_targets_that_are_probably_in_another_unit_are_reported(run, tmp_path):
    """The file stays valid; so does mode sla without an ITL, which validate names too."""
    file = tmp_path / "graph.yaml"
    graph = yaml.safe_load((SAMPLES / "disaggregated.yaml").read_text())
    graph["spec"] |= {"slo": {"ttft": "500s", "itl": "50s"}, "router": {"tiers": {"slo": {}}}}
    graph["spec"]["router"]["tiers"] = {"enabled": True, "slo": {"premium": {"ttft": "2m"}}}
    file.write_text(yaml.safe_dump(graph))
    status, _, err = run("validate", file)
    assert status == 0
    assert [line.removeprefix(f"warning: {file}: spec.") for line in err.splitlines()] == [
        "slo.ttft: 500s is unusual, above 1m; check its unit",
        "slo.itl: 50s is unusual, above 1s; check its unit",
        "router.tiers.slo.premium.ttft: 2m is unusual, above 1m; check its unit",
    ]
    del graph["spec"]["slo"], graph["spec"]["router"]
    graph["spec"]["planner"] = {"mode": "sla"}
    file.write_text(yaml.safe_dump(graph))
    assert "spec.slo.itl: null, so mode sla sizes decode by its capacity alone" in run("validate", file)[2]


def test_a_device_that_no_budget_counts_is_reported(run, tmp_path):
    """As the operator's Event says it; the file stays valid."""
    file = tmp_path / "graph.yaml"
    graph = yaml.safe_load((SAMPLES / "disaggregated.yaml").read_text())
    main = {"name": "main", "resources": {"limits": {"acme.io/npu": 1}}}
    graph["spec"]["services"]["decode"]["podTemplate"] = {"spec": {"containers": [main]}}
    file.write_text(yaml.safe_dump(graph))
    status, out, err = run("validate", file)
    assert (status, out) == (0, f"{file}: valid (GraphDeployment llama)\n")
    place = "spec.services.decode.podTemplate.spec.containers[main].resources"
    assert err.startswith(
        f"warning: {file}: {place}: acme.io/npu is a device that the GPU budget does not count; if it is"
    )


def test_a_file_that_pods_lack_is_a_local_graphs_alone(run, tmp_path):
    """Validate warns, as the graph may be a local one; what renders it for a cluster refuses it."""
    file = tmp_path / "graph.yaml"
    graph = yaml.safe_load((SAMPLES / "disaggregated.yaml").read_text())
    graph["spec"]["router"] = {"tiers": {"enabled": True, "keysFile": "keys.txt"}}
    file.write_text(yaml.safe_dump(graph))
    status, out, err = run("validate", file)
    assert (status, out) == (0, f"{file}: valid (GraphDeployment llama)\n")
    words = "spec.router.tiers.keysFile: keys.txt is not in the pods of service"
    assert err.startswith(f"warning: {file}: {words}")
    assert run("render", file)[0] == 0
    status, out, err = run("render", file, "--kubernetes")
    assert (status, out) == (2, "")
    assert words in err


def test_a_planner_that_has_nothing_to_scale_is_reported(run, tmp_path):
    """Services without `scaling` are of a fixed size, which a first manifest easily forgets."""
    file = tmp_path / "graph.yaml"
    graph = yaml.safe_load((SAMPLES / "disaggregated.yaml").read_text())
    for service in graph["spec"]["services"].values():
        service.pop("scaling", None)
    file.write_text(yaml.safe_dump(graph))
    status, _, err = run("validate", file)
    assert (status, err.count("\n")) == (0, 1)
    assert "spec.planner: enabled, but no service may change its number of replicas" in err
    graph["spec"]["planner"] = {"enabled": False}
    file.write_text(yaml.safe_dump(graph))
    assert run("validate", file)[2] == ""


def test_no_sample_holds_a_key_that_does_nothing(run):
    """Every manifest that ships validates without a warning, except for engines in a folder of one host."""
    status, _, err = run("validate", *sorted(SAMPLES.glob("*.yaml")))
    others = [line for line in err.splitlines() if "spec.engine.pythonEnvironment: .venv-" not in line]
    assert (status, others) == (0, [])


def test_all_problems_of_all_files_are_printed(run, tmp_path):
    """A bad file hides neither its own further problems nor those of others; the status is 2."""
    bad = tmp_path / "bad.yaml"
    bad.write_text(
        (SAMPLES / "aggregated.yaml").read_text().replace("maxGpuBudget: 8", "maxGpuBudget: 0\n    mode: x")
    )
    status, out, err = run("validate", bad, tmp_path / "none.yaml", SAMPLES / "disaggregated.yaml")
    assert status == 2
    assert len(err.splitlines()) == 3
    assert "spec.planner.maxGpuBudget" in err
    assert "spec.planner.mode" in err
    assert f"{tmp_path}/none.yaml: there is no such file" in err
    assert out.count("valid (") == 1


def test_problems_as_json(run, tmp_path):
    """--json prints one object with file, line, path and message of each problem."""
    bad = tmp_path / "bad.yaml"
    bad.write_text("kind: GraphDeployment\nspec: {zzz: 1}\n")
    status, out, _ = run("validate", "--json", bad)
    report = json.loads(out)
    assert status == 2
    assert (report["valid"], report["files"][0]["valid"]) == (False, False)
    unknown = next(each for each in report["problems"] if each["path"] == "spec.zzz")
    assert (unknown["file"], unknown["line"]) == (str(bad), 2)
    assert unknown["message"].startswith("unknown key")


def test_render_text_masks_secrets(run, tmp_path):
    """Each process is one command; secrets are hidden."""
    file = tmp_path / "g.yaml"
    text = (SAMPLES / "vllm-disaggregated.yaml").read_text()
    file.write_text(text.replace("  lease:", "  env: [{name: HF_TOKEN, value: hf_secret}]\n  lease:"))
    status, out, _ = run("render", file, "--service", "decode")
    assert status == 0
    assert "vllm serve" in out
    assert "--tensor-parallel-size 2" in out
    assert "HF_TOKEN='***'" in out
    assert "hf_secret" not in out


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["--service", "nothing"], "choose one of frontend, prefill, decode, planner"),
        (["--graph", "nothing"], "no GraphDeployment 'nothing'"),
        (["--speed", "0"], "must be a finite number above 0"),
    ],
)
def test_render_refuses_what_is_not_there(run, arguments, part):
    """An unknown service or graph, or an impossible speed, is a usage error."""
    status, _, err = run("render", SAMPLES / "disaggregated.yaml", *arguments)
    assert status == 2
    assert part in err


def test_import_prints_manifest_and_list(run, dgd):
    """The manifest goes to stdout, what was not carried to stderr; the latter alone fails a strict import."""
    status, out, err = run("import", dgd)
    assert status == 0
    assert yaml.safe_load(out)["spec"]["services"] == {"worker": {"role": "aggregated"}}
    assert err == (
        f"{dgd}: not carried: line 8: spec.services.Worker.dynamoNamespace: "
        '"other": is the graph\'s own namespace and name here\n'
    )
    assert run("import", "--strict", dgd) == (1, out, err)
    dgd.write_text(DGD.replace("      dynamoNamespace: other\n", ""))
    assert run("import", "--strict", dgd) == (0, out, "")


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("dgd-disaggregated.yaml", "line 10: spec.services.Frontend.dynamoNamespace"),
        ("dgd-planner-v1beta1.yaml", "line 87: (another object)"),
    ],
)
def test_the_deployments_of_the_docs_import_as_they_say(run, tmp_path, name, loss):
    """What import prints is a manifest that validate accepts."""
    status, out, err = run("import", SAMPLES.parent / "import" / name)
    graph = tmp_path / "graph.yaml"
    graph.write_text(out)
    assert status == run("validate", graph)[0] == 0
    assert f"not carried: {loss}" in err


@pytest.mark.parametrize("value", ["y", "N", "1e3", "0o17", "1_000", ".5", "12", "on", "1.0e+5"])
def test_texts_that_kubectl_would_read_otherwise_are_quoted(run, dgd, value):
    """PyYAML leaves some of them bare, which kubectl's parser takes for booleans and numbers."""
    dgd.write_text(DGD.replace("dynamoNamespace: other", f"envs: [{{name: A, value: '{value}'}}]"))
    status, out, _ = run("import", dgd)
    assert status == 0
    assert f"value: '{value}'" in out


def test_import_writes_a_file(run, dgd, tmp_path):
    """--output writes what would be printed; a folder that is not there is an error."""
    output = tmp_path / "out.yaml"
    assert run("import", dgd, "--output", output)[:2] == (0, "")
    assert output.read_text() == run("import", dgd)[1]
    status, _, err = run("import", dgd, "-o", tmp_path / "no" / "out.yaml")
    assert status == 2
    assert "out.yaml: cannot be written to: No such file or directory; create its folder" in err


EVERYTHING = """\
  model: {name: m, servedName: s, contextTokens: 4096}
  engine: {blockTokens: 32, kvBlocks: 99, maxRunningRequests: 9, maxBatchTokens: 999, streamIntervalTokens: 2, kvBufferDevice: cpu}
  router: {tiers: {enabled: true}}
"""  # fmt: skip


@pytest.mark.parametrize("extra", ["", EVERYTHING])
@pytest.mark.parametrize("sample", ["aggregated", "disaggregated", "two-node-pools"])
def test_rendered_commands_are_understood(tmp_path, sample, extra):
    """Each of our own processes accepts every argument that a graph gives it."""
    file = tmp_path / "g.yaml"
    manifest = yaml.safe_load((SAMPLES / f"{sample}.yaml").read_text())
    manifest["spec"].update(yaml.safe_load(extra) or {})
    for service in manifest["spec"]["services"].values():
        service["startupSeconds"] = 3
    file.write_text(yaml.safe_dump(manifest))
    context = RuntimeContext(
        python="py",
        graph_file=str(file),
        discovery=str(tmp_path / "s.json"),
        namespace="n",
        speed=20,
        log_dir="l",
    )
    for spec in process_specs(load_graph(file), context):
        _, _, module, group, command, *arguments = filled_argv(spec, {"port": 8123})
        assert module == "penstock.cli"
        parsed = cli.get_command(None, group).get_command(None, command).make_context(command, arguments)
        assert parsed.params["speed"] == 20


def test_kubernetes_objects_are_rendered(run):
    """--kubernetes prints one document per object, adapters included, in the graph's namespace, without owner."""
    status, out, err = run("render", SAMPLES / "vllm-disaggregated.yaml", "--kubernetes")
    assert (status, err) == (0, "")
    objects = list(yaml.safe_load_all(out))
    assert {each["metadata"]["namespace"] for each in objects} == {"serving"}
    assert not any("ownerReferences" in each["metadata"] for each in objects)
    names = [(each["kind"], each["metadata"]["name"]) for each in objects]
    assert names[0] == ("ServiceAccount", "llama-vllm-router")
    assert names[-2:] == [("ScalingAdapter", "llama-vllm-prefill"), ("ScalingAdapter", "llama-vllm-decode")]
    assert "&id" not in out
    assert "graph.yaml: |\n" in out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--kubernetes", "--format", "json"], "--kubernetes: excludes --format and --speed"),
        (["--kubernetes", "--speed", "2"], "--kubernetes: excludes --format and --speed"),
        (["--kubernetes", "--service", "planner"], "--service: 'planner' is not in graph llama-agg"),
        (["--namespace", "ns"], "--namespace: only with --kubernetes"),
    ],
)
def test_flags_that_do_not_fit_a_rendering_are_refused(run, flags, message):
    """Nothing is ignored silently; the status is 2."""
    status, out, err = run("render", SAMPLES / "aggregated.yaml", *flags)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("context_tokens", "cut"),
    [(None, ""), (131_072, ""), (2048, " --max-input-tokens 409 --on-long truncate")],
)
def test_the_load_that_up_proposes_fits_the_model(context_tokens, cut):
    """The built-in trace's prompts are longer than many contexts; a worker would refuse each."""
    command = load_command(context_tokens, speed=1.0, url="http://127.0.0.1:8000")
    expected = (
        f"penstock load --trace mooncake --rate 1 --limit 300 --speed 1{cut} --url http://127.0.0.1:8000"
    )
    assert command == expected


def test_standard_input_is_a_file_too(run, monkeypatch):
    """`validate -` and `render -` read it; the rendered commands name a file that is to be made of it."""
    text = (SAMPLES / "disaggregated.yaml").read_bytes()

    def given():
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text)))

    given()
    assert run("validate", "-")[:2] == (0, "-: valid (GraphDeployment llama)\n")
    given()
    status, out, _ = run("render", "-", "--json")
    planner = next(each for each in json.loads(out) if each["service"] == "planner")
    assert (status, planner["argv"][planner["argv"].index("--graph") + 1]) == (0, "GRAPH.yaml")
    given()
    _, out, _ = run("render", "-", "--kubernetes", "--json")
    assert {"Deployment", "Service"} <= {each["kind"] for each in json.loads(out)}
    assert run("render", SAMPLES / "disaggregated.yaml", "--json", "--format", "yaml")[0] == 2


def test_samples_as_json(run):
    """Names with their summaries, or one with its text."""
    listed = json.loads(run("samples", "--json")[1])
    assert {"disaggregated", "sla"} <= {each["name"] for each in listed}
    one = json.loads(run("samples", "sla", "--json")[1])
    assert one["text"] == (SAMPLES / "sla.yaml").read_text()


@pytest.mark.parametrize(
    ("template", "key", "entry"),
    [
        ({"spec": {"hostIPC": True}}, "spec.hostIPC", "hostIPC"),
        ({"spec": {"hostNetwork": True}}, "spec.hostNetwork", "hostNetwork"),
        (
            {
                "spec": {
                    "containers": [
                        {"name": "main", "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}}}
                    ]
                }
            },
            "capabilities.add",
            "capabilities=IPC_LOCK",
        ),
        ({"spec": {"serviceAccountName": "hfsa"}}, "spec.serviceAccountName", "serviceAccounts=hf*"),
    ],
)
def test_validate_refuses_what_the_operator_refuses(tmp_path, template, key, entry):
    """It names the key, its line, and the chart's value that allows it; with that it is valid."""
    spec = {"model": {"name": "m"}, "runtime": "vllm", "planner": {"enabled": False}}
    spec["services"] = {"router": {"role": "router"}, "agg": {"role": "aggregated", "podTemplate": template}}
    manifest = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": {"name": "g"},
        "spec": spec,
    }
    file = tmp_path / "g.yaml"
    file.write_text(yaml.safe_dump(manifest))
    said = CliRunner().invoke(cli, ["validate", str(file)])
    assert said.exit_code == 2
    assert key in said.output
    assert f"podTemplates.allow.{entry.partition('=')[0]}: " in said.output
    assert CliRunner().invoke(cli, ["validate", "--allow-pod-templates", entry, str(file)]).exit_code == 0
    rendered = ["render", str(file), "--kubernetes"]
    assert CliRunner().invoke(cli, rendered).exit_code != 0
    assert CliRunner().invoke(cli, [*rendered, "--allow-pod-templates", entry]).exit_code == 0


def test_validate_refuses_gpus_that_the_budget_does_not_count(tmp_path):
    """As the operator does."""
    limits = {"containers": [{"name": "main", "resources": {"limits": {"nvidia.com/gpu": 4}}}]}
    agg = {"role": "aggregated", "gpusPerReplica": 2, "podTemplate": {"spec": limits}}
    spec = {"model": {"name": "m"}, "runtime": "vllm", "planner": {"enabled": False}}
    spec["services"] = {"router": {"role": "router"}, "agg": agg}
    manifest = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "GraphDeployment",
        "metadata": {"name": "g"},
        "spec": spec,
    }
    file = tmp_path / "g.yaml"
    file.write_text(yaml.safe_dump(manifest))
    said = CliRunner().invoke(cli, ["validate", str(file)])
    assert said.exit_code == 2
    assert "the budget counts 2" in said.output


def test_gpu_resources_are_those_of_the_chart_where_they_are_given(run, tmp_path):
    """A device that the operator counts is refused alongside the budget's own; so it is for render."""
    file = tmp_path / "graph.yaml"
    graph = yaml.safe_load((SAMPLES / "disaggregated.yaml").read_text())
    main = {"name": "main", "resources": {"limits": {"acme.io/npu": 2}}}
    graph["spec"]["services"]["decode"]["podTemplate"] = {"spec": {"containers": [main]}}
    file.write_text(yaml.safe_dump(graph))
    known = ["--gpu-resources", "nvidia.com/gpu, acme.io/*"]
    assert run("validate", file)[0] == 0
    status, _, err = run("validate", file, *known)
    assert status == 2
    assert "acme.io/npu" in err
    assert run("render", file, "--kubernetes")[0] == 0
    assert run("render", file, "--kubernetes", *known)[0] != 0
    assert "--gpu-resources: is empty" in run("validate", file, "--gpu-resources", " ,")[2]


def test_validate_refuses_a_profile_requests_pod_template_as_the_operator_does(tmp_path):
    """The same rules, by the same chart's value."""
    worker = {"role": "decode"}
    template = {
        "model": {"name": "m"},
        "runtime": "simulated",
        "services": {"router": {"role": "router"}, "prefill": {"role": "prefill"}, "decode": worker},
        "planner": {"enabled": False},
    }
    spec = {
        "template": template,
        "isl": 100,
        "osl": 10,
        "maxGpus": 1,
        "podTemplate": {"spec": {"hostPID": True}},
    }
    spec |= {"slo": {"ttft": "1s", "itl": "100ms"}}
    manifest = {
        "apiVersion": "penstock.dev/v1alpha1",
        "kind": "ProfileRequest",
        "metadata": {"name": "p"},
        "spec": spec,
    }
    file = tmp_path / "p.yaml"
    file.write_text(yaml.safe_dump(manifest))
    said = CliRunner().invoke(cli, ["validate", str(file)])
    assert said.exit_code == 2
    assert "podTemplates.allow.hostPID: true" in said.output
    assert CliRunner().invoke(cli, ["validate", "--allow-pod-templates", "hostPID", str(file)]).exit_code == 0
