"""Documents that people read in the repository: their links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from penstock.cli.main import cli
from penstock.router.policy.registry import POLICIES

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/**/*.md")]
)
CODE_BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://)([^)\s]+)\)")


def _anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, by GitHub's rule."""
    text = CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    """A relative link names an existing file or folder, and its anchor a heading there."""
    broken = []
    for link in LINK.findall(CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))):
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            broken.append(link)

    assert broken == []


def test_every_test_that_shows_a_feature_exists() -> None:
    """A row of docs/features.md is shown by its command."""
    named = set(re.findall(r"\b(?:tests|e2e)/[\w./-]*\w", (ROOT / "docs/features.md").read_text()))

    assert sorted(each for each in named if not (ROOT / each).exists()) == []


def test_a_paragraph_of_the_docs_has_at_most_600_characters() -> None:
    """Longer ones are not read; lists, tables and code are other things, and docs/manifest.md is generated."""
    long = []
    for page in ROOT.glob("docs/**/*.md"):
        text = CODE_BLOCK.sub("\n", page.read_text(encoding="utf-8"))
        for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|]|\d+\.) ?)", text):
            shown = LINK.sub("]", " ".join(block.split()))
            if len(shown) > 600 and not shown.startswith("|") and page.name != "manifest.md":
                long.append(f"{page.name}: {shown[:60]}")

    assert long == []


def test_the_docs_stay_within_30_000_written_words() -> None:
    """What a user needs fits; measurements belong to bench/, and docs/manifest.md is generated."""
    pages = [page for page in ROOT.glob("docs/**/*.md") if page.name != "manifest.md"]

    assert sum(len(page.read_text(encoding="utf-8").split()) for page in pages) <= 30_000


def test_the_example_of_a_decision_is_what_the_command_prints() -> None:
    """docs/planner.md explains the output of `planner decide --example`, line by line."""
    shown = re.search(r"```text\n(d000012.*?)```", (ROOT / "docs/planner.md").read_text(), re.DOTALL)
    example = CliRunner().invoke(cli, ["planner", "decide", "--example"]).stdout
    printed = CliRunner().invoke(cli, ["planner", "decide", "-"], input=example).stdout

    assert shown is not None
    assert printed == shown.group(1)


def test_the_policy_in_30_lines_runs_as_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/routing.md's class, registered under its name there, serves a simulated trace."""
    found = re.search(r"```python\n(.*?)```", (ROOT / "docs/routing.md").read_text(), re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    exec(found.group(1), names)
    monkeypatch.setitem(POLICIES, "shortest-of-three", lambda _: names["ShortestOfThree"]())
    options = ["--policy", "shortest-of-three", "--trace", "mooncake", "--limit", "40", "--qps", "2"]
    result = CliRunner().invoke(cli, ["simulate", *options, "--json"])

    assert result.exit_code == 0, result.output
    assert "shortest-of-three" in json.dumps(json.loads(result.stdout))
