"""`penstock samples`: the manifests that the distribution carries."""

from __future__ import annotations

from click.testing import CliRunner

from penstock.api.manifests import parse_manifests
from penstock.cli.samples import sample_files, samples


def test_a_sample_is_printed_as_it_stands_and_is_valid():
    """What is printed can be redirected to a file and started."""
    for name, path in sample_files().items():
        printed = CliRunner().invoke(samples, [name])
        assert path.read_text(encoding="utf-8") == printed.output
        assert parse_manifests(printed.output, name)[1] == []
