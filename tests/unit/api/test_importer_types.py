"""What an import makes of scripts, of the newer version, and of values of any type."""

from __future__ import annotations

import copy
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidSpecError
from penstock_dynamo.importer import import_dgd
from penstock_dynamo.importer.command import NO_CONNECTOR, NOT_COMPUTED, NOT_RUN, parse_command

FOLDER = Path(__file__).parents[3] / "manifests/import"
EXAMPLES = [next(yaml.safe_load_all(each.read_text())) for each in sorted(FOLDER.glob("*.yaml"))]
WORDS = ["", "sh", "-c", "python3", "-m", "dynamo.vllm", "--model", "$X", "0", "gpu", "prefill", "${A}", "{"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-1, 9) | st.floats(allow_nan=False) | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS), inner, max_size=3),
    max_leaves=6,
)


def places(value, path=()):
    """Every key and item of a manifest, at any depth."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield (*path, key)
        yield from places(item, (*path, key))


def assert_converted_or_refused(text):
    """Import a deployment; every problem of a refusal names the file."""
    problems = ()
    try:
        import_dgd(text, "f.yaml")
    except InvalidSpecError as refusal:
        problems = refusal.problems or ("refused for no reason",)
    assert all(each.file == "f.yaml" for each in problems)


@settings(max_examples=50)
@given(st.data())
def test_any_value_at_any_place_is_converted_or_refused(data):
    """A deployment with other values at up to three of its keys ends in a graph, or in problems with their file."""
    manifest = copy.deepcopy(data.draw(st.sampled_from(EXAMPLES)))
    for _ in range(data.draw(st.integers(1, 3))):
        *path, last = data.draw(st.sampled_from(list(places(manifest))))
        holder = manifest
        for key in path:
            holder = holder[key]
        holder[last] = data.draw(VALUES)
    assert_converted_or_refused(yaml.safe_dump(manifest))


MAIN = {"name": "main"}


def beta(spec, **more):
    """A deployment of the newer version with one component."""
    return {"components": [{"type": "worker", "podTemplate": {"spec": spec}, **more}]}


@pytest.mark.parametrize(
    "spec",
    [
        *(
            {"pvcs": [1], "services": {"W": {"componentType": "worker", **extra}}}
            for extra in (
                {"componentType": []},
                {"subComponentType": {}},
                {"volumeMounts": 1},
                {"resources": {"limits": {"gpu": "²"}}},
                {"resources": {"limits": {"gpu": []}}},
                {"extraPodSpec": {"nodeSelector": "gpu"}},
                {"extraPodSpec": {"volumes": 5}, "sharedMemory": {"size": "1Gi"}},
                {"extraPodSpec": {"mainContainer": {"volumeMounts": "m"}}, "sharedMemory": {"size": "1Gi"}},
            )
        ),
        {"components": 5},
        {"components": [3]},
        beta({}, name=[]),
        beta({"containers": 3}, sharedMemorySize=0),
        beta({"containers": [{**MAIN, "resources": 3}]}),
        beta({"containers": [{**MAIN, "resources": {"limits": 3}}]}),
    ],
    ids=str,
)
def test_values_of_a_wrong_type_are_refused_or_listed(spec):
    """What a key cannot hold is a problem with its file or an unconverted value, never a traceback."""
    version = "v1beta1" if "components" in spec else "v1alpha1"
    body = {
        "kind": "DynamoGraphDeployment",
        "apiVersion": f"nvidia.com/{version}",
        "metadata": {"name": "chat"},
        "spec": spec,
    }
    assert_converted_or_refused(yaml.safe_dump(body))


VLLM = "python3 -m dynamo.vllm"


def parsed(script, *arguments):
    """The command of a shell's script."""
    return parse_command(["/bin/bash", "-c", script, *arguments], {"MODEL": "m/x"})


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (f"exec {VLLM} \\\n  --model a \\\n  --seed 1\n", ["--model", "a", "--seed", "1"]),
        (f'{VLLM} --model $MODEL --x "${{MODEL}}"', ["--model", "m/x", "--x", "m/x"]),
        (f"/opt/venv/bin/{VLLM} --a 2>&1", ["--a"]),
        (f'exec {VLLM} "$@" --z', ["--model", "a b", "--z"]),
    ],
)
def test_a_script_with_one_command_is_read_whole(script, words):
    """Joined lines, stated variables, quoted parts and the script's own arguments."""
    command = parsed(script, "--", "--model", "a b")
    assert (command.module, command.words, command.left_out) == ("dynamo.vllm", words, [])


@pytest.mark.parametrize(
    "script",
    [
        f"A=1 {VLLM} --a | tee -a /w/log",
        f"set -e\n/sbin/ldconfig\nA=1 {VLLM} --a > /w/log",
        f"wait() {{ kill $pid; }}; A=1 {VLLM} --a &\nwait",
    ],
)
def test_what_stands_beside_the_command_is_listed(script):
    """The variables before the command are its environment."""
    command = parsed(script)
    assert (command.words, command.env, command.left_out) == (["--a"], {"A": "1"}, [(script, NOT_RUN)])


@pytest.mark.parametrize(
    ("script", "left_out"),
    [
        (
            f'{VLLM} --kv-transfer-config "$(cat /etc/x.json)" --a',
            ("--kv-transfer-config $(cat /etc/x.json)", NO_CONNECTOR),
        ),
        (f"{VLLM} --x=$UNKNOWN --a", ("--x=$UNKNOWN", NOT_COMPUTED)),
        (f"{VLLM} --x `hostname` --a", ("--x `hostname`", NOT_COMPUTED)),
        (f"RANK=$UNKNOWN {VLLM} --a", ("RANK=$UNKNOWN", NOT_COMPUTED)),
    ],
)
def test_what_only_a_shell_can_compute_is_left_out_by_name(script, left_out):
    """With the flag that needs it."""
    command = parsed(script)
    assert (command.words, command.left_out) == (["--a"], [left_out])


@pytest.mark.parametrize(
    ("script", "words", "env"),
    [
        (f"export A=b\nTP=4\n{VLLM} --a $A --t $TP", ["--a", "b", "--t", "4"], {"A": "b"}),
        (
            f"export A=b B='$A c' # why\n{VLLM} --a ${{A}} --b \"$B\"",
            ["--a", "b", "--b", "$A c"],
            {"A": "b", "B": "$A c"},
        ),
        (f"A=b; export A=$A/c && {VLLM} --a /m/$A", ["--a", "/m/b/c"], {"A": "b/c"}),
        (
            f'C=\'{{"k": "$v"}}\'\nexport D="$C"\n{VLLM} --a "$D"',
            ["--a", '{"k": "$v"}'],
            {"D": '{"k": "$v"}'},
        ),
        (f"MODEL=n\n{VLLM} --a $MODEL --b '$MODEL'", ["--a", "n", "--b", "$MODEL"], {}),
    ],
)
def test_literal_assignments_of_a_script_count_like_the_containers_variables(script, words, env):
    """In their order; what is exported is the worker's environment as well, and nothing is left out."""
    command = parsed(script)
    assert (command.words, command.env, command.left_out) == (words, env, [])


@pytest.mark.parametrize(
    "before",
    [
        "export MODEL=$(cat /m)",
        "MODEL=`cat /m`",
        "if [ -e /m ]; then\nexport MODEL=x\nfi",
        "test -e /m && MODEL=x",
        "test -e /m || MODEL=x",
        "for MODEL in a b; do MODEL=x; done",
        "set() {\nMODEL=x\n}",
        ": ${MODEL:=x}",
        "read -r MODEL",
        "unset MODEL",
        "MODEL+=x",
        "MODEL='x; y'",
        "export MODEL=${OTHER}",
        "MODEL=x python3 other.py; MODEL=$(pwd)",
    ],
)
def test_a_variable_that_only_a_shell_can_compute_is_not_guessed(before):
    """Its container's value does not count either: the flag is left out and named."""
    command = parsed(f"{before}\n{VLLM} --a $MODEL")
    assert command.words == []
    assert [why for _, why in command.left_out] == [NOT_RUN, NOT_COMPUTED]


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ('--speculative-config "${SPEC}"', ["--speculative-config", "$(SPEC)"]),
        ("--speculative-config $SPEC", ["--speculative-config", "$(SPEC)"]),
        ('"--seed=$SPEC"', ["--seed=$(SPEC)"]),
        ("$SPEC", []),
        ("--enforce-eager=1 $SPEC", ["--enforce-eager=1"]),
    ],
)
def test_a_variable_that_the_cluster_knows_is_left_to_kubernetes(word, words):
    """One word of a ConfigMap's becomes its own `$(NAME)`; bare ones may be several flags and are named instead."""
    command = parse_command(["sh", "-c", f"exec {VLLM} {word}"], {"SPEC": None})
    assert command.words == words
    assert [text for text, _ in command.left_out] == ["$(SPEC)"] * (
        not any("$(SPEC)" in each for each in words)
    )


def test_kubernetes_own_references_to_literal_variables_are_filled_in():
    """The graph's model is a name, not a reference; what the cluster alone knows stays one."""
    command = parse_command(
        ["python3", "-m", "dynamo.vllm", "--model", "$(M)", "--x", "$(Y)"], {"M": "m/x", "Y": None}
    )
    assert command.words == ["--model", "m/x", "--x", "$(Y)"]


@pytest.mark.parametrize(
    "script", [f"{VLLM} --a & {VLLM} --b", "a && b", f"{VLLM} 'open", "python3 -m m", ""]
)
def test_a_script_that_starts_dynamo_by_no_command_or_several_is_not_read(script):
    """Nothing is guessed."""
    assert parsed(script) is None


@given(st.text(alphabet="ab '\"\\$(){}<>|&;=\n#`\x00@-", max_size=60))
def test_any_script_is_read_or_not(text):
    """No text ends in a traceback."""
    for script in (text, f"{VLLM} {text}"):
        assert parsed(script) is None or parsed(script).module == "dynamo.vllm"


BETA = textwrap.dedent("""\
    apiVersion: nvidia.com/v1beta1
    kind: DynamoGraphDeployment
    metadata: {name: chat}
    spec:
      env: [{name: LOG, value: debug}]
      components:
      - name: Frontend
        type: frontend
        replicas: 1
        podTemplate: {spec: {containers: [{name: main, image: "repo/vllm-runtime:1.6"}]}}
      - name: VllmDecodeWorker
        type: decode
        replicas: 2
        sharedMemorySize: 16Gi
        scalingAdapter: {}
        podTemplate:
          metadata: {labels: {team: chat}}
          spec:
            nodeSelector: {gpu: a100}
            containers:
            - name: main
              image: repo/vllm-runtime:1.6
              command: [python3, -m, dynamo.vllm]
              args: [--model, Qwen/Small, --disaggregation-mode, decode]
              envFrom: [{secretRef: {name: hf-token}}]
              workingDir: /workspace
              resources: {limits: {nvidia.com/gpu: "1"}, requests: {ephemeral-storage: 2Gi, cpu: "4"}}
            - {name: log, image: l}
      - name: VllmPrefillWorker
        type: prefill
        multinode: {nodeCount: 2}
        compilationCache: {pvcName: cache}
        podTemplate:
          spec:
            containers:
            - name: main
              image: repo/vllm-runtime:1.6
              command: [python3]
              args: [-m, dynamo.vllm, --model, Qwen/Small, --disaggregation-mode=prefill, -tp, "2"]
              resources: {limits: {nvidia.com/gpu: "1"}}
    """)


def test_the_newer_version_is_carried():
    """Components with native pod templates, as Dynamo's newer examples have them; losses at their own lines."""
    result = import_dgd(BETA)
    assert result.unconverted == ()
    spec = result.graph.to_manifest()["spec"]
    assert (spec["model"], spec["image"]) == ({"name": "Qwen/Small"}, "repo/vllm-runtime:1.6")
    assert spec["env"] == [{"name": "LOG", "value": "debug"}]
    assert spec["nodePools"] == {"a100": {"nodeSelector": {"gpu": "a100"}}}
    decode, prefill = (spec["services"][f"vllm-{role}-worker"] for role in ("decode", "prefill"))
    assert (decode["role"], decode["replicas"], decode["nodePool"]) == ("decode", 2, "a100")
    assert decode["scaling"] == {}
    assert decode["envFrom"] == [{"secretRef": {"name": "hf-token"}}]
    assert decode["podTemplate"]["metadata"] == {"labels": {"team": "chat"}}
    main, log = decode["podTemplate"]["spec"]["containers"]
    assert main["resources"] == {"requests": {"ephemeral-storage": "2Gi", "cpu": "4"}}
    assert (main["workingDir"], log["name"]) == ("/workspace", "log")
    assert decode["podTemplate"]["spec"]["volumes"][0]["emptyDir"]["sizeLimit"] == "16Gi"
    assert (prefill["role"], prefill["gpusPerReplica"], prefill["nodesPerReplica"]) == ("prefill", 2, 2)
    assert "args" not in decode
    cache = prefill["podTemplate"]["spec"]["containers"][0]["volumeMounts"]
    assert cache == [{"name": "cache", "mountPath": "/root/.cache/vllm"}]


def test_another_engine_in_the_newer_version_is_refused_at_its_own_place():
    """The path is the one that the user wrote."""
    with pytest.raises(InvalidSpecError) as caught:
        import_dgd(BETA.replace("[python3, -m, dynamo.vllm]", "[python3, -m, dynamo.mine]"))
    (problem,) = caught.value.problems
    assert problem.path == "spec.components[1].podTemplate.spec.containers[0].command"
    assert problem.line == 23
