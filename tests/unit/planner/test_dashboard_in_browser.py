"""The dashboard in TensorBoard as a browser shows it: what the person who opens it finds there."""

from __future__ import annotations

import base64
import math
import os
import shutil
import subprocess
from pathlib import Path

import orjson
import pytest

from penstock.cli.dashboard import CHARTS, serve_command
from penstock_planner.dashboard import Dashboard
from penstock_planner.decide.demand.observation import Demand

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
PICTURE = os.environ.get("PENSTOCK_DASHBOARD_PICTURE")
"""A file that the screenshot is kept in, too."""

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH; apt-get install chromium"),
]


@pytest.fixture(name="folder")
async def _folder_of_a_run(world):
    """Ten minutes of a ramp that decode follows, drawn by the planner's own dashboard."""
    board = Dashboard(world.folder / "board", world.config)
    world.watch(board)
    world.measure_latency(
        lambda count: {"ttft": ((0.1, count), (0.5, 2 * count), (math.inf, 2 * count)), "itl": ()}
    )
    world.load.kv = lambda now, _workers: 0.6 + 0.35 * math.sin(now / 60)
    world.load.demand = _demand
    await world.run_until(600)
    board.close()
    return world.folder / "board"


def _demand(now_s):
    """A wave of requests that swells and ebbs with the KV usage."""
    arrivals = round(12 + 10 * math.sin(now_s / 60))
    tokens = 1000 * arrivals
    done = {"completed": arrivals, "uncached_tokens": tokens, "prefilled_tokens": tokens}
    return Demand(period_s=1.0, arrivals=arrivals, **done, waiting=arrivals // 4, oldest_wait_s=arrivals / 10)


@pytest.fixture(name="url")
def _tensorboard(folder, monkeypatch):
    """TensorBoard, started as `penstock dashboard` starts it, on a free port."""
    # The page shows the folder as it was given.
    monkeypatch.chdir(folder.parent)
    pytest.importorskip("tensorboard")
    command = [*serve_command(Path(folder.name), 0), "--load_fast", "false", "--reload_interval", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as server:
        said = next((line for line in server.stderr if "http://" in line), "")
        yield said[said.index("http://") :].split()[0]
        server.terminate()


class Browser:
    """Chromium without a window, steered by its DevTools protocol over a pipe: JSON between null bytes."""

    def __init__(self, profile: Path) -> None:
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--remote-debugging-pipe",
        ]
        command = [CHROMIUM, *flags, f"--user-data-dir={profile}", "--window-size=1500,1592"]
        # Chromium reads at descriptor 3 and writes at 4.
        moved = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'
        self._process = subprocess.Popen(
            ["bash", "-c", moved, *command], pass_fds=(theirs_in, theirs_out), stderr=subprocess.DEVNULL
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._answers, self._orders = os.fdopen(ours_in, "rb"), os.fdopen(ours_out, "wb")
        self._pending = b""
        self._session: dict[str, str] = {}

    def open(self, url: str) -> None:
        """Show a page; what is asked next is asked of it."""
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        attached = self.ask("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self.ask("Page.navigate", url=url)

    def ask(self, method: str, **params: object) -> dict:
        """Return the result of one command; events meanwhile are passed over."""
        self._orders.write(
            orjson.dumps({"id": 1, "method": method, "params": params, **self._session}) + b"\0"
        )
        self._orders.flush()
        while True:
            answer = orjson.loads(self._message())
            if answer.get("id") == 1:
                assert "result" in answer, answer
                return answer["result"]

    def _message(self) -> bytes:
        while b"\0" not in self._pending:
            read = self._answers.read1()
            assert read, "chromium ended"
            self._pending += read
        message, self._pending = self._pending.split(b"\0", 1)
        return message

    def close(self) -> None:
        """End the browser."""
        self._session = {}
        self.ask("Browser.close")
        self._process.wait(30)
        self._answers.close()
        self._orders.close()


SEEN = """new Promise(done => {
  const inner = root => [...root.querySelectorAll('*')].flatMap(e => [e, ...(e.shadowRoot ? inner(e.shadowRoot) : [])]);
  let looks = 0;
  const look = () => {
    const all = inner(document), wanted = %s;
    const texts = new Set(all.filter(e => e.checkVisibility()).flatMap(e =>
      [...e.childNodes].filter(n => n.nodeType === 3).map(n => n.textContent.trim())));
    const lines = all.filter(e => e.tagName === 'path' && (e.getAttribute('d') || '').length > 100);
    const missing = wanted.filter(w => !texts.has(w));
    const colours = [...new Set(lines.map(e => getComputedStyle(e).stroke))];
    const loading = all.some(e => e.tagName.startsWith('PAPER-SPINNER') && e.active && e.checkVisibility());
    if ((missing.length || loading || colours.length < 4) && ++looks < 120) setTimeout(look, 500);
    else done({missing, colours});
  };
  look();
})"""
"""What of the wanted texts the page lacks, and the colours of its lines, once all are there and nothing loads, or after a minute."""


@pytest.fixture(name="browser")
def _browser(tmp_path):
    browser = Browser(tmp_path / "profile")
    yield browser
    browser.close()


def test_a_browser_shows_curves_and_charts(url, browser):
    """Each curve is a run in the list, the mode's charts stand under their headings, lines differ in colour."""
    curves = [
        "kv/measured",
        "kv/up threshold",
        "kv/down threshold",
        "replicas/ready",
        "replicas/desired",
        "gpus/budget",
    ]
    charts = [
        "Load and thresholds",
        "KV usage, fraction",
        "Prefill queue, requests",
        "Demand and supply",
        "Replicas",
    ]
    browser.open(f"{url}{CHARTS}")
    drawn = ["Matches (3)"]  # Curves of the KV chart: measured, and both thresholds.
    wanted = orjson.dumps(curves + charts + drawn).decode()
    answer = browser.ask("Runtime.evaluate", expression=SEEN % wanted, awaitPromise=True, returnByValue=True)
    seen = answer["result"]["value"]
    if PICTURE:
        png = browser.ask("Page.captureScreenshot")["data"]
        Path(PICTURE).write_bytes(base64.b64decode(png))
    assert seen["missing"] == []
    assert len(seen["colours"]) >= 4
