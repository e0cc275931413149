"""The Job of `penstock simulate --render-job` on a real API server and Job controller."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from click.testing import CliRunner
from operating import until

from penstock.cli.main import cli
from penstock.kube.kinds import POD

pytestmark = [pytest.mark.cluster]

SAMPLE = Path(__file__).parents[2] / "manifests/samples/disaggregated.yaml"


@pytest.fixture
def rendered_sweep(tmp_path, monkeypatch):
    """What `penstock simulate --render-job` prints of three runs of a graph."""
    monkeypatch.chdir(tmp_path)
    Path("graph.yaml").write_text(SAMPLE.read_text())
    given = ["--manifest", "graph.yaml", "--policy", "least-loaded", "--seeds", "3", "--limit", "20"]
    return (
        CliRunner().invoke(cli, ["simulate", *given, "--render-job", "sweep"], catch_exceptions=False).stdout
    )


async def test_a_rendered_sweep_becomes_a_pod_for_each_index(
    controllers, client, make_namespace, rendered_sweep
):
    """The server takes it without an unknown field, and the restricted standard lets its pods be made."""
    namespace = make_namespace(labels={"pod-security.kubernetes.io/enforce": "restricted"})
    create = ("create", "--validate=strict", "-n", namespace, "-f", "-")
    await asyncio.to_thread(controllers.kubectl, *create, stdin=rendered_sweep)

    async def made():
        found = (
            await client.list(POD, namespace=namespace, labels={"app.kubernetes.io/instance": "sweep"})
        ).items
        return found if len(found) == 3 else None

    pods = await until(made, "three pods")
    indexes = {pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"] for pod in pods}
    assert indexes == {"0", "1", "2"}
    for pod in pods:
        container = pod["spec"]["containers"][0]
        assert "$(JOB_COMPLETION_INDEX)/3" in container["args"]
        assert "JOB_COMPLETION_INDEX" in {each["name"] for each in container["env"]}
