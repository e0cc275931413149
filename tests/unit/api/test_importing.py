"""Which importer converts a text, and what is said where none does."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from penstock.api.manifests import importing, parse_manifests
from penstock.core.errors import ConfigError, InvalidSpecError


def convert(text, file=None, *, name=None):
    """Stand for the importer of another distribution."""
    return text, file, name


@pytest.fixture
def installed(monkeypatch):
    """Let the named kinds have an importer, and no other."""

    def install(*kinds):
        points = {kind: EntryPoint(kind, f"{kind.lower()}:convert", importing.GROUP) for kind in kinds}
        monkeypatch.setattr(importing, "registered", lambda group: points)
        monkeypatch.setattr(importing, "load", lambda group, name, **_: convert)

    return install


def test_the_importer_of_the_foreign_kind_converts(installed):
    """Other objects of the text are its to report; file and name are handed on."""
    installed("AcmeGraph", "Other")
    text = "kind: ConfigMap\n---\nkind: AcmeGraph\n"

    assert importing.import_graph(text, "f.yaml", name="a") == (text, "f.yaml", "a")


@pytest.mark.parametrize(
    ("text", "held"), [("kind: ConfigMap", "no"), ("kind: A\n---\nkind: B", "A and B"), ("[1]", "no")]
)
def test_a_text_without_one_kind_to_convert_is_refused(installed, text, held):
    """The message names what can be converted."""
    installed("A", "B")
    with pytest.raises(InvalidSpecError) as raised:
        importing.import_graph(text)

    assert f"holds {held} object that can be converted; give a file with one of A, B" in str(raised.value)


def test_a_broken_text_is_refused_with_its_line(installed):
    """Before any importer reads it."""
    installed("A")
    with pytest.raises(InvalidSpecError, match="1"):
        importing.import_graph("kind: [A")


def test_without_an_importer_the_installation_is_blamed(installed):
    """Penstock brings one."""
    installed()
    with pytest.raises(ConfigError, match="install penstock again"):
        importing.import_graph("kind: A")


@pytest.mark.parametrize(("kind", "hint"), [("AcmeGraph", True), ("Other", False)])
def test_a_foreign_kind_is_sent_to_import_where_that_converts_it(installed, kind, hint):
    """Any kind that a distribution registered; others are a mistake."""
    installed("AcmeGraph")
    _, problems = parse_manifests(f"kind: {kind}\n")

    assert ("convert it with `penstock import`" in str(problems[0])) is hint
