import copy
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.core.errors import InvalidSpecError
from penstock.runtimes.dynamo.importer import import_dgd

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
    try:
        problems = ()
        import_dgd(yaml.safe_dump(manifest), "f.yaml")
    except InvalidSpecError as refusal:
        problems = refusal.problems
    assert {each.file for each in problems} <= {"f.yaml"}


@pytest.mark.parametrize(
    "extra",
    [
        {"componentType": []},
        {"subComponentType": {}},
        {"volumeMounts": 1},
        {"resources": {"limits": {"gpu": "²"}}},
        {"resources": {"limits": {"gpu": []}}},
        {"extraPodSpec": {"nodeSelector": "gpu"}},
        {"extraPodSpec": {"volumes": 5}, "sharedMemory": {"size": "1Gi"}},
        {"extraPodSpec": {"mainContainer": {"volumeMounts": "m"}}, "sharedMemory": {"size": "1Gi"}},
    ],
    ids=str,
)
def test_values_of_a_wrong_type_are_refused_or_listed(extra):
    """What a key cannot hold is a problem with its file or an unconverted value, never a traceback."""
    body = {
        "kind": "DynamoGraphDeployment",
        "apiVersion": "nvidia.com/v1alpha1",
        "metadata": {"name": "chat"},
        "spec": {
            "pvcs": 1,
            "backendFramework": "vllm",
            "services": {"W": {"componentType": "worker", **extra}},
        },
    }
    try:
        assert import_dgd(yaml.safe_dump(body), "f.yaml").graph.name == "chat"
    except InvalidSpecError as refusal:
        problems = refusal.problems
        assert problems
        assert {each.file for each in problems} == {"f.yaml"}


def test_a_threshold_that_is_no_number_is_refused_by_its_key():
    """A frontend's flag with a word for a number names the key that it became."""
    text = """
        apiVersion: nvidia.com/v1alpha1
        kind: DynamoGraphDeployment
        metadata: {name: chat}
        spec:
          services:
            Frontend:
              componentType: frontend
              extraPodSpec:
                mainContainer:
                  command: [python3, -m, dynamo.frontend]
                  args: [--active-decode-blocks-threshold, most]
            Worker:
              componentType: worker
              extraPodSpec: {mainContainer: {args: [--model, Q]}}
    """
    with pytest.raises(InvalidSpecError, match="activeDecodeBlocksThreshold"):
        import_dgd(text, "f.yaml")
