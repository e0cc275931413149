"""`make docs` fails where the site has a broken link or lacks a page."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def _break_a_link(site: Path) -> None:
    page = site / "docs/glossary.md"
    page.write_text(page.read_text(encoding="utf-8") + "\n[gone](no-such-page.md)\n", encoding="utf-8")


def _break_an_anchor(site: Path) -> None:
    page = site / "docs/glossary.md"
    page.write_text(
        page.read_text(encoding="utf-8") + "\n[gone](router.md#no-such-heading)\n", encoding="utf-8"
    )


def _add_a_page(site: Path) -> None:
    (site / "docs/not-in-the-navigation.md").write_text("# A page\n", encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (_break_a_link, "no-such-page.md"),
        (_break_an_anchor, "no-such-heading"),
        (_add_a_page, "not-in-the-navigation.md"),
    ],
)
def test_the_site_is_not_built_with_a_fault(
    tmp_path: Path, change: Callable[[Path], None], named: str
) -> None:
    """The command that CI runs ends with an error that names the link or the page."""
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    shutil.copy2(ROOT / "mkdocs.yml", tmp_path)
    change(tmp_path)

    built = subprocess.run(
        [
            "make",
            f"--makefile={ROOT / 'Makefile'}",
            f"--old-file={sys.prefix}/.dev",
            f"VENV={sys.prefix}",
            "docs",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )

    assert built.returncode != 0, built.stderr
    assert named in built.stderr
