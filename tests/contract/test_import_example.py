"""The DynamoGraphDeployment that the docs show imports as they say."""

from pathlib import Path

from click.testing import CliRunner

from penstock_cli.main import cli

EXAMPLE = Path(__file__).resolve().parents[2] / "manifests" / "import" / "dgd-disaggregated.yaml"


def test_the_example_becomes_a_valid_graph(tmp_path):
    """What import prints is a manifest that validate accepts."""
    imported = CliRunner().invoke(cli, ["import", str(EXAMPLE)])
    graph = tmp_path / "graph.yaml"
    graph.write_text(imported.stdout)

    checked = CliRunner().invoke(cli, ["validate", str(graph)])

    assert 0 == imported.exit_code == checked.exit_code
    assert "not carried: line 10: spec.services.Frontend.dynamoNamespace" in imported.stderr
