"""The DynamoGraphDeployments that the docs show import as they say."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from penstock.cli.main import cli

FOLDER = Path(__file__).resolve().parents[2] / "manifests" / "import"


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("dgd-disaggregated.yaml", "line 10: spec.services.Frontend.dynamoNamespace"),
        ("dgd-planner-v1beta1.yaml", "line 87: (another object)"),
    ],
)
def test_the_example_becomes_a_valid_graph(tmp_path, name, loss):
    """What import prints is a manifest that validate accepts."""
    imported = CliRunner().invoke(cli, ["import", str(FOLDER / name)])
    graph = tmp_path / "graph.yaml"
    graph.write_text(imported.stdout)

    checked = CliRunner().invoke(cli, ["validate", str(graph)])

    assert 0 == imported.exit_code == checked.exit_code
    assert f"not carried: {loss}" in imported.stderr
