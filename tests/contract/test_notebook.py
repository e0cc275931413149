"""docs/notebook.md: its cells run as written, draw its figure, and show what its text says of them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
import pytest

pytestmark = pytest.mark.slow  # its cells simulate for several seconds
DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the names that the page's cells leave, run one after another in an empty folder."""
    page = (DOCS / "notebook.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {"folder": tmp_path_factory.mktemp("notebook")}
    mpl.use("agg")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(names["folder"])
        for cell in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
            exec(cell, names)
    plt.close("all")
    return names


def test_its_figure_is_drawn(ran: dict[str, Any]) -> None:
    """The picture that the page shows is one that its last cell writes."""
    drawn = (ran["folder"] / "notebook.png").read_bytes()
    shown = (DOCS / "images" / "notebook.png").read_bytes()
    assert drawn.startswith(b"\x89PNG")
    assert drawn[16:24] == shown[16:24], "width and height"


def test_its_text_is_true_of_its_policies(ran: dict[str, Any]) -> None:
    """DualMap is above least-loaded from 2 requests/s on, and below Preble and Min TTFT at every rate."""
    in_time = ran["in_time"]
    assert (in_time["dualmap"] > in_time["least-loaded"])[2.0:].all()
    assert in_time["dualmap"][3.0] > 4 * in_time["least-loaded"][3.0]
    assert (in_time["dualmap"] < in_time[["preble", "min-ttft"]].min(axis=1)).all()


def test_its_text_is_true_of_its_planners(ran: dict[str, Any]) -> None:
    """99% and 95% in time, the latter for half as many GPU-hours again."""
    rows = ran["scaling"].set_index("planner")
    assert round(100 * rows.on_time["adaptive"]) == 99
    assert round(100 * rows.on_time["hpa"]) == 95
    assert rows.gpu_hours["hpa"] / rows.gpu_hours["adaptive"] == pytest.approx(1.5, abs=0.05)
