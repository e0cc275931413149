"""`penstock samples`: the manifests that the distribution carries."""

from __future__ import annotations

from click.testing import CliRunner

from penstock.api.manifests import parse_manifests
from penstock.cli.samples import sample_files, samples


def test_every_sample_is_listed_with_what_it_is():
    """The list names each sample and says in a line what it shows."""
    lines = CliRunner().invoke(samples).output.splitlines()
    assert list(sample_files()) == [line.split()[0] for line in lines]
    assert all(len(line.split()) > 3 for line in lines)


def test_a_sample_is_printed_as_it_stands_and_is_valid():
    """What is printed can be redirected to a file and started."""
    for name, path in sample_files().items():
        printed = CliRunner().invoke(samples, [name])
        assert path.read_text(encoding="utf-8") == printed.output
        assert parse_manifests(printed.output, name)[1] == []


def test_an_unknown_sample_names_the_known_ones():
    """A typo is a usage error that lists the names."""
    answer = CliRunner().invoke(samples, ["disagregated"])
    assert answer.exit_code == 2
    assert "disaggregated" in answer.output
