"""Manifests are read and validated: every problem with its line and one sentence."""

from __future__ import annotations

import textwrap

import pytest
import yaml

from penstock.api import GraphDeployment, ProfileRequest
from penstock.api.manifests import MAX_FILE_BYTES, load_graph, load_manifests, parse_manifests
from penstock.api.manifests.nodes import MAX_NODES
from penstock.api.manifests.validation import suggestion, validate
from penstock.core.errors import InvalidSpecError

HEAD = """\
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: llama}
"""
BODY = """\
spec:
  model: {name: m}
  services:
    prefill: {role: prefill}
    decode: {role: decode}
"""
VALID = HEAD + BODY


def problems_of(text):
    """Line and path of each problem."""
    return [(each.line, each.path) for each in parse_manifests(text, "f.yaml")[1]]


def messages_of(text):
    """What each problem says."""
    return [each.message for each in parse_manifests(text, "f.yaml")[1]]


def refused(source):
    """The problems for which a source is refused."""
    with pytest.raises(InvalidSpecError) as caught:
        load_graph(source)
    return caught.value.problems


def test_text_and_file_give_the_same_graph(tmp_path):
    """A string with a line break is a manifest, any other string or path is a file."""
    file = tmp_path / "g.yaml"
    file.write_text(VALID)
    assert load_graph(VALID) == load_graph(file) == load_graph(str(file))


def test_all_problems_come_at_once_with_their_lines():
    """Type errors, unknown keys, rules and duplicates of one file are reported together, in its order."""
    text = textwrap.dedent("""\
        apiVersion: penstock.dev/v1alpha1
        kind: GraphDeployment
        metadata:
          name: Llama
        spec:
          model: {name: 5}
          runtime: vllmm
          services:
            prefill:
              role: prefill
              replicas: 9
              scaling:
                maxReplicas: 8
              nodePool: nope
            decode:
              role: decode
              args:
              - --flag
              - 3
          planner:
            maxGpuBudjet: 8
            decodeKvScaleUpThreshold: 0.4
            noOperation: true
            noOperation: false
        """)
    assert problems_of(text) == [
        (4, "metadata.name"),
        (6, "spec.model.name"),
        (7, "spec.runtime"),
        (11, "spec.services.prefill.replicas"),
        (14, "spec.services.prefill.nodePool"),
        (19, "spec.services.decode.args[1]"),
        (20, "spec.planner.decodeKvScaleDownThreshold"),
        (21, "spec.planner.maxGpuBudjet"),
        (24, "spec.planner.noOperation"),
    ]


def test_rules_that_read_an_invalid_value_stay_silent():
    """A budget that is not a number gives one problem, not a second one about the budget."""
    text = VALID + "  planner: {maxGpuBudget: many, minGpuBudget: 30}\n"
    assert problems_of(text) == [(9, "spec.planner.maxGpuBudget")]


def test_a_broken_rule_of_a_section_hides_no_rule_around_it():
    """The section is set aside after the value in it, and takes nothing else with it."""
    services = "  services: {decode: {role: decode}}\n"
    text = f"{HEAD}spec:\n  model: {{name: m}}\n{services}  planner: {{prefillQueueScaleDownThreshold: 2}}\n"
    assert problems_of(text) == [(6, "spec.services"), (7, "spec.planner.prefillQueueScaleDownThreshold")]


def test_merge_keys_and_anchors_are_expanded():
    """`<<` fills in what is not written, whatever the order."""
    text = HEAD + textwrap.dedent("""\
        spec:
          model: {name: m}
          services:
            prefill: &base
              role: prefill
              terminationGracePeriodSeconds: 60
              scaling: {maxReplicas: 4}
            decode:
              role: decode
              <<: *base
        """)
    decode = load_graph(text).spec.services["decode"]
    assert (decode.role, decode.termination_grace_period_seconds, decode.scaling.max_replicas) == (
        "decode",
        60,
        4,
    )


def test_line_of_a_key_that_overrides_a_merged_one_is_its_own():
    """An explicit key after or before `<<` is reported at its own line."""
    text = HEAD + textwrap.dedent("""\
        spec:
          model: {name: m}
          services:
            prefill: &base
              role: prefill
            decode:
              role: nothing
              <<: *base
        """)
    assert problems_of(text) == [(10, "spec.services.decode.role")]


@pytest.mark.parametrize(
    ("text", "line", "part"),
    [
        ("a: [1, 2\nb: 3\n", 2, "malformed YAML at column 2"),
        ("a: b: c\n", 1, "mapping values are not allowed"),
        ("a:\n\t- b\n", 2, "cannot start any token"),
        ("a: 'x\n", 2, "malformed YAML"),
        ("a: *nowhere\n", 1, "undefined alias"),
        ("a: \x07\n", 1, "malformed YAML"),
        ("? [a, b]\n: c\nkind: GraphDeployment\n", 1, "a key must be text"),
        ("kind: GraphDeployment\n1: x\n", 2, "not text to YAML; quote it"),
        ("kind: GraphDeployment\non: x\n", 2, "not text to YAML; quote it"),
        ("kind: GraphDeployment\nspec: !!python/name:os.system x\n", 2, "is not known"),
        ("kind: GraphDeployment\nspec: !!binary aGk=\n", 2, "binary data"),
        ("kind: GraphDeployment\nspec: !!int many\n", 2, "not a valid int"),
        ("kind: GraphDeployment\nspec: &a\n  b: *a\n", 3, "contains it"),
        ("kind: GraphDeployment\nspec:\n  <<: 3\n", 3, "merges maps only"),
        ("kind: GraphDeployment\nspec: &a\n  <<: *a\n", 2, "contains it"),
        ("a: " + "[" * 65 + "]" * 65, 1, "nested deeper than 64 levels"),
        ("---\n---\nkind: Graph\n", 3, "not one of GraphDeployment"),
    ],
)
def test_bad_yaml_is_reported_with_its_line(text, line, part):
    """Whatever is wrong with the text itself has a line and a remedy."""
    found = [each for each in parse_manifests(text, "f.yaml")[1] if part in each.message]
    assert [(each.file, each.line) for each in found] == [("f.yaml", line)]


def test_aliases_cannot_grow_without_bound():
    """Nested aliases are refused before they fill the memory."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 9)]
    assert str(MAX_NODES) in messages_of("\n".join(lines) + "\n")[0]


@pytest.mark.parametrize(
    ("text", "path", "part"),
    [
        ("", "", "holds no manifest"),
        ("- a\n", "", "a list where a map"),
        ("just text\n", "", '"just text" where a map'),
        ("a: 1\n", "kind", "add kind: GraphDeployment"),
        ("kind: Graph\n", "kind", "not one of GraphDeployment, ScalingAdapter"),
        ("kind: DynamoGraphDeployment\n", "kind", "penstock import"),
        (BODY + "kind: GraphDeployment\nmetadata: {name: a}\n", "apiVersion", "missing; add apiVersion"),
    ],
)
def test_other_documents_are_refused(text, path, part):
    """What is not a manifest of ours is told apart, with the remedy."""
    problems = parse_manifests(text)[1]
    assert [problem.path for problem in problems] == [path]
    assert part in problems[0].message


def test_several_documents_of_both_kinds():
    """A file may hold graphs and their adapters."""
    adapter = (
        "---\napiVersion: penstock.dev/v1alpha1\nkind: ScalingAdapter\n"
        "metadata: {name: llama-decode}\nspec: {graph: llama, service: decode, replicas: 2}\n"
    )
    manifests = load_manifests(VALID + adapter)
    assert [each.name for each in manifests.graphs] == ["llama"]
    assert [(each.spec.service, each.spec.replicas) for each in manifests.adapters] == [("decode", 2)]
    dangling = VALID + adapter.replace("service: decode", "service: dekode")
    assert problems_of(dangling) == [(13, "spec.service")]


def test_a_second_graph_of_the_same_name_is_refused():
    """Two objects of one kind, namespace and name are a mistake."""
    assert problems_of(VALID + "---\n" + VALID) == [(12, "metadata.name")]


def test_one_graph_of_several_is_chosen_by_name():
    """Where a file holds several graphs, a name is needed."""
    two = VALID + "---\n" + VALID.replace("llama", "other")
    assert load_graph(two, name="other").name == "other"
    assert "2 GraphDeployments (llama, other)" in refused(two)[0].message
    with pytest.raises(InvalidSpecError, match="no GraphDeployment 'x' here \\(found: llama, other\\)"):
        load_graph(two, name="x")


def test_files_that_cannot_be_read(tmp_path):
    """Missing, folder, too large, not UTF-8: each has its own message with the file's name."""
    large = tmp_path / "large.yaml"
    large.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    foreign = tmp_path / "latin.yaml"
    foreign.write_bytes(b"a: 1\nb: caf\xe9\n")
    expected = {
        tmp_path / "none.yaml": "no such file",
        tmp_path: "is a folder",
        large: f"larger than {MAX_FILE_BYTES} bytes",
        foreign: "byte 11 (0xe9) is not UTF-8",
        "bad\0name": "cannot be read",
    }
    for source, part in expected.items():
        problem = refused(source)[0]
        assert part in problem.message
        assert problem.file == str(source)
    assert refused(foreign)[0].line == 2


def test_a_byte_order_mark_is_ignored(tmp_path):
    """Editors of Windows may put one."""
    file = tmp_path / "g.yaml"
    file.write_bytes(b"\xef\xbb\xbf" + VALID.encode())
    assert load_graph(file).name == "llama"


def test_what_the_api_server_returns_is_valid(build):
    """Metadata and status that a cluster fills in do not make a manifest invalid."""
    manifest = build().to_manifest()
    manifest["metadata"] |= {
        "uid": "u", "resourceVersion": "12", "generation": 3, "creationTimestamp": "2026-01-01T00:00:00Z",
        "managedFields": [{"manager": "kubectl"}], "finalizers": ["penstock.dev/drain"],
    }  # fmt: skip
    manifest["status"] = {
        "observedGeneration": 3,
        "phase": "Ready",
        "conditions": [
            {
                "type": "Ready", "status": "True", "reason": "Serving", "message": "a request is served",
                "lastTransitionTime": "2026-01-01T00:00:00Z", "observedGeneration": 3,
            }
        ],
        "services": {"decode": {"replicas": 2, "ready": 2, "gpus": 2}},
        "planner": {"lastDecision": "hold", "gpus": 3, "budget": 8},
    }  # fmt: skip
    assert parse_manifests(yaml.safe_dump(manifest))[1] == []
    unquoted = yaml.safe_dump(manifest).replace("'2026-01-01T00:00:00Z'", "2026-01-01T00:00:00Z")
    assert parse_manifests(unquoted)[1] == []


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
            {"planner": {"metricPullingIntervalSeconds": "30s"}},
            '"30s" where a number is needed; write one such as 0.5, without quotes',
        ),
        (
            {"planner": {"metricPullingIntervalSeconds": float("inf")}},
            "Infinity is not finite; write an ordinary number",
        ),
        (
            {"planner": {"adjustmentIntervalSeconds": 2.5}},
            "2.5 where a whole number is needed; write one such as 8, without quotes or fraction",
        ),
        ({"planner": None}, "nothing where a map of keys is needed; indent its keys below it, or remove it for the defaults"),
        ({"nodePools": ["a"]}, "a list where a map of keys is needed; indent its keys below it, or remove it for the defaults"),
        ({"env": {"A": "b"}}, "a map where a list is needed; write each item on a line that starts with a hyphen"),
        ({"image": ["a"]}, "a list where text is needed; write text"),
        ({"image": False}, "false where text is needed; put it in quotes"),
        ({"image": ""}, '"" does not fit; use a container image without spaces, such as vllm/vllm-openai:v0.11.0'),
        (
            {"runtime": "vlm"},
            '"vlm" is not one of vllm, dynamo, sglang, trtllm, simulated; did you mean vllm?',
        ),
        (
            {"runtime": "tensorrt"},
            '"tensorrt" is not one of vllm, dynamo, sglang, trtllm, simulated; choose one of them, or install the package that adds it',
        ),
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


REQUEST = """\
apiVersion: penstock.dev/v1alpha1
kind: ProfileRequest
metadata: {name: fast}
spec:
  isl: 3000
  osl: 150
"""
TEMPLATE = """\
  template:
    model: {name: m}
    runtime: simulated
    services:
      worker: {role: aggregated}
"""


def test_a_request_names_a_graph_or_describes_one():
    """Alongside a graph in one file."""
    manifests, found = parse_manifests(
        f"{REQUEST}  graph: llama\n---\n{REQUEST}{TEMPLATE}".replace("fast", "a", 1)
    )
    assert found == []
    assert [(each.name, each.spec.graph) for each in manifests.profile_requests] == [
        ("a", "llama"),
        ("fast", None),
    ]


@pytest.mark.parametrize(
    ("more", "path", "part"),
    [
        ("", "spec.graph", "both or neither of graph and template"),
        (f"  graph: llama\n{TEMPLATE}", "spec.graph", "both or neither of graph and template"),
        ("  graph: llama\n  maxGpus: 2\n  tensorParallel: [1, 4]\n", "spec.tensorParallel", "4 exceeds maxGpus 2"),
        ("  graph: llama\n  slo: {ttfts: 1s}\n", "spec.slo.ttfts", "did you mean ttft"),
        ("  graph: llama\n  podTemplate: {spec: {nodeSelectr: {}}}\n", "spec.podTemplate.spec.nodeSelectr", "did you mean nodeSelector"),
        (TEMPLATE.replace("aggregated", "prefill"), "spec.template.services", "no decode service"),
        (TEMPLATE.replace("model:", "modell:"), "spec.template.modell", "did you mean model"),
    ],
)  # fmt: skip
def test_each_broken_rule_blames_its_key(more, path, part):
    """Also below template, as in a graph of its own."""
    found = parse_manifests(REQUEST + more)[1]
    assert path in [each.path for each in found if part in each.message]
    assert all(each.line is not None for each in found)


def test_a_name_that_leaves_no_room_for_the_jobs_is_refused():
    """52 characters fit."""
    assert messages_of(REQUEST.replace("fast", "a" * 52) + "  graph: llama\n") == []
    (message,) = messages_of(REQUEST.replace("fast", "a" * 53) + "  graph: llama\n")
    assert "has 53 characters" in message


@pytest.mark.parametrize(
    ("spec", "sizes"),
    [
        ({}, (1,)),
        ({"maxGpus": 6}, (1, 2, 4)),
        ({"maxGpus": 8}, (1, 2, 4, 8)),
        ({"maxGpus": 8, "tensorParallel": [8, 2, 8]}, (2, 8)),
    ],
)
def test_sizes_are_powers_of_two_unless_said(spec, sizes):
    """Each once, the smallest first."""
    data = {"metadata": {"name": "a"}, "spec": {"graph": "g", "isl": 1, "osl": 1, **spec}}
    assert ProfileRequest.model_validate(data).spec.sizes == sizes


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("  slo: {attainment: 99}", "below 1; a share is written as a fraction, 99% as 0.99"),
        ("  model: {name: x, contextTokens: 128k}", "write 131072 or 128000, without quotes or letters"),
        (
            "  planner: {schedule: [{name: x, cron: 0 0 8 * * *, durationSeconds: 60}]}",
            "five fields with one space between: minute, hour, day of month, month, day of week; no seconds",
        ),
        ("\tslo: {}", "replace the tab by spaces"),
    ],
)
def test_what_people_type_is_answered_by_what_to_write(line, remedy):
    """Percent, thousands, seconds of a cron expression, tabs."""
    text = f"apiVersion: penstock.dev/v1alpha1\nkind: GraphDeployment\nmetadata: {{name: x}}\nspec:\n  runtime: simulated\n{line}\n"
    assert any(remedy in each.message for each in parse_manifests(text)[1])


def test_a_tab_before_the_first_key_of_a_mapping_is_named():
    """The parser's own message is about a token there."""
    (problem,) = parse_manifests("kind: GraphDeployment\nspec:\n\tmodel: x\n")[1]
    assert problem.message.endswith("replace the tab by spaces")
    assert problem.line == 3
    (problem,) = parse_manifests("kind: GraphDeployment\nspec: @x\n")[1]
    assert "tab" not in problem.message
