import pytest
import yaml

from penstock_core.errors import InvalidSpecError
from penstock_importer import import_dgd


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
