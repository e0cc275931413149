"""Documents that people read in the repository: their links lead somewhere."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from PIL import Image

from penstock.api import Role, RouterConfig
from penstock.cli.main import cli
from penstock.core import plugins
from penstock.core.errors import ConfigError
from penstock.router.core.retries import Assignment
from penstock.router.core.worker import WorkerSpec
from penstock.router.policy.registry import make_policy
from penstock.router.policy.routing_policy import Arrival
from penstock.router.server import RouterServer
from penstock.router.settings import RouterSettings

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in (
        "README.md",
        "CONTRIBUTING.md",
        "operator/*.md",
        "planner/*.md",
        "docs/**/*.md",
        "bench/**/*.md",
    )
    for path in ROOT.glob(pattern)
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


def test_the_example_of_a_decision_is_what_the_command_prints() -> None:
    """docs/read-a-decision.md explains the output of `planner decide --example`, line by line."""
    shown = re.search(r"```text\n(d000012.*?)```", (ROOT / "docs/read-a-decision.md").read_text(), re.DOTALL)
    example = CliRunner().invoke(cli, ["planner", "decide", "--example"]).stdout
    printed = CliRunner().invoke(cli, ["planner", "decide", "-"], input=example).stdout

    assert shown is not None
    assert printed == shown.group(1)


@pytest.fixture
def guide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Install the package of docs/routing.md's guide for a test: its module and its entry point, as a distribution."""
    text = (ROOT / "docs/routing.md").read_text(encoding="utf-8")
    module = re.search(r"```python\n(# (\w+\.py)\n.*?)```", text, re.DOTALL)
    project = re.search(r"```toml\n(.*?)```", text, re.DOTALL)
    assert module is not None
    assert project is not None
    (tmp_path / module[2]).write_text(module[1], encoding="utf-8")
    groups = tomllib.loads(project[1])["project"]["entry-points"]
    info = tmp_path / "guide-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: guide\nVersion: 1.0\n", encoding="utf-8")
    entries = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in names.items())
        for group, names in groups.items()
    )
    (info / "entry_points.txt").write_text(entries, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    plugins.registered.cache_clear()
    yield
    plugins.registered.cache_clear()


@pytest.mark.usefixtures("guide")
def test_the_policy_in_30_lines_is_found_by_the_simulator() -> None:
    """docs/routing.md's package serves a simulated trace, and shows its name."""
    options = ["--policy", "shortest-of-three", "--trace", "mooncake", "--limit", "40", "--rate", "2"]
    result = CliRunner().invoke(cli, ["simulate", *options, "--json", "--jobs", "1"])

    assert result.exit_code == 0, result.output
    assert [row["policy"] for row in json.loads(result.stdout)["summary"]] == ["shortest-of-three"]


@pytest.mark.usefixtures("guide")
def test_the_policy_in_30_lines_is_found_by_the_live_router() -> None:
    """A manifest names it, and the live router's core asks it; it has no parameters."""
    config = RouterConfig.model_validate({"policy": "shortest-of-three"})
    workers = tuple(WorkerSpec(name, Role.AGGREGATED, f"http://{name}", supervised=True) for name in "ab")
    server = RouterServer(RouterSettings("m", disaggregated=False, config=config, workers=workers))
    server.core.set_workers(workers, 0.0)
    (effect,) = server.core.acquire(object(), Role.AGGREGATED, Arrival((1,), 512), 0.0)  # type: ignore[arg-type]

    assert isinstance(effect, Assignment)
    assert effect.reason.startswith("shortest queue of three")
    with pytest.raises(ConfigError, match=r"router\.policyParameters: depth: .* has none"):
        make_policy(config.model_copy(update={"policy_parameters": {"depth": 2}}))


def test_the_site_brings_no_fonts_from_elsewhere() -> None:
    """The theme's default loads its fonts from Google in each reader's browser."""
    assert re.search(r"^  font: false\b", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)


def test_the_recording_of_the_live_page_is_animated_and_loads_at_once() -> None:
    """README shows it on the first screen: several frames in less than 2 MB."""
    file = ROOT / "docs/images/live-page.webp"

    with Image.open(file) as picture:
        assert picture.n_frames >= 8
    assert file.stat().st_size < 2_000_000
