"""Renews the pictures of docs/images that show what a user sees; the body of `make images`.

    python bench/images.py [--only demo,page,tensorboard,notebook,routing,pool] [--folder DIR]

demo: the report's, of `penstock demo` on this machine; on a busy one their titles say so, and they are not to be committed.
page: the live page of a sample's graph under load, in chromium, with a recording of it. tensorboard: the dashboard of a scripted wave, in chromium.
notebook and pool: of simulations, the same on each machine. routing: of the record in bench/dualmap. Other benches draw with their records.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml
from PIL import Image

from penstock.local.ports import unused_port
from penstock.report.drawing import DPI
from penstock.simulator.charts import capacity, hits

ROOT = Path(__file__).resolve().parents[1]
PENSTOCK = [sys.executable, "-m", "penstock.cli"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SPEED = 5.0
LOAD = "sine:rate=4,amplitude=0.6,period_s=300,duration_s=900,input_tokens=6000,output_tokens=200,share=0.4"
EVENING = "duration_s=14400,count=100000,input_tokens=10000,output_tokens=400,length_cv=0.5"
POOLED = {"chat": f"sine:rate=1.0,amplitude=1,period_s=10800,{EVENING}"}
POOLED["batch"] = f"ramp:rate=0.25,peak=7,step_s=3600,step_length_s=3600,{EVENING}"
"""Four hours of the graphs of manifests/samples/gpu-pool.yaml. Chosen: batch borrows what chat leaves, and gives it back."""
SLO_S = 5.0
"""Of the record's runs."""
LOAD_S = 500.0
"""Simulated seconds of load before the live page is taken. Chosen: its charts then show a fleet that has grown and shrunk."""
FRAME_S = 5.0
"""Real seconds between two frames of the recording, at least. Chosen: about one browser's start."""
FRAME_SHOWN_MS = 700
RECORDING_SIZE = (975, 759)
RECORDING_BYTES = 2_000_000
"""Maximum size of the recording. Chosen: a README that loads at once."""


def run(command: list[str], **more: str) -> None:
    """Run a command in the repository, its variables alongside ours; it ends the run where it fails."""
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | more)


def demo(folder: Path, work: Path) -> None:
    """Take the two pictures of the README from a demo's report."""
    run([*PENSTOCK, "demo", "--output-dir", str(work / "demo")])
    for drawn, name in (("replicas.png", "replicas.png"), ("counterfactual.png", "other-fleets.png")):
        shutil.copy(work / "demo" / "report" / drawn, folder / name)


def page(folder: Path, work: Path) -> None:
    """Record the live page of the disaggregated sample while it serves a wave of requests, and take its last picture."""
    state = {"PENSTOCK_LOCAL_STATE_DIR": str(work / "state")}
    manifest = "manifests/samples/disaggregated.yaml"
    port = unused_port()
    url = f"http://127.0.0.1:{port}"
    run(
        [*PENSTOCK, "up", manifest, f"--speed={SPEED:g}", f"--port={port}", f"--log-dir={work / 'log'}"],
        **state,
    )
    try:
        with _loaded(url):
            frames = _frames(f"{url}/ui", work, until_s=time.monotonic() + LOAD_S / SPEED)
            httpx.get(f"{url}/ui/state", timeout=30).raise_for_status()
            _screenshot(f"{url}/ui", folder / "live-page.png", work, "1300,1012")
        _record(frames, folder / "live-page.webp")
    finally:
        run([*PENSTOCK, "down", "--now"], **state)


def _frames(url: str, work: Path, *, until_s: float) -> list[Path]:
    """Take pictures of a page until a time of the monotonic clock."""
    frames: list[Path] = []
    while (due_s := time.monotonic() + FRAME_S) < until_s:
        frames.append(work / f"frame-{len(frames):03}.png")
        _screenshot(url, frames[-1], work, "1300,1012")
        time.sleep(max(0.0, due_s - time.monotonic()))
    return frames


def _record(frames: list[Path], recording: Path) -> None:
    """Make one animated picture of several pictures."""
    shown = [
        Image.open(each).convert("RGB").resize(RECORDING_SIZE, Image.Resampling.LANCZOS) for each in frames
    ]
    first, *others = shown
    first.save(
        recording, save_all=True, append_images=others, duration=FRAME_SHOWN_MS, loop=0, quality=70, method=6
    )
    size = recording.stat().st_size
    if size > RECORDING_BYTES:
        raise SystemExit(f"{recording}: {size:,} bytes, above {RECORDING_BYTES:,}; take fewer frames")


@contextmanager
def _loaded(url: str) -> Iterator[None]:
    load = ["load", "--trace", LOAD, "--url", url, f"--speed={SPEED:g}"]
    with subprocess.Popen(
        [*PENSTOCK, *load], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            yield
        finally:
            process.kill()


def _screenshot(url: str, picture: Path, work: Path, size: str) -> None:
    assert CHROMIUM is not None
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={work / 'browser'}",
    ]
    # In virtual time, which stands while the page waits for its state.
    flags += [f"--window-size={size}", "--virtual-time-budget=4000", f"--screenshot={picture}"]
    subprocess.run([CHROMIUM, *flags, url], check=True, stderr=subprocess.DEVNULL)


def tensorboard(folder: Path, _work: Path) -> None:
    """Let the nightly test that opens the dashboard keep its screenshot."""
    test = "tests/unit/planner/test_dashboard_in_browser.py"
    picture = {"PENSTOCK_DASHBOARD_PICTURE": str(folder / "tensorboard.png")}
    run([sys.executable, "-m", "pytest", "-q", "-n", "0", "-m", "nightly", test], **picture)


def notebook(folder: Path, work: Path) -> None:
    """Execute docs/notebook.md, whose last cell draws."""
    text = (ROOT / "docs/notebook.md").read_text(encoding="utf-8")
    script = work / "notebook.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)), encoding="utf-8")
    subprocess.run(
        [sys.executable, str(script)], cwd=work, check=True, env=os.environ | {"MPLBACKEND": "agg"}
    )
    shutil.copy(work / "notebook.png", folder / "notebook.png")


def routing(folder: Path, _work: Path) -> None:
    """Draw what bench/dualmap/RESULTS.md records of two loads; its figures are rounded, so that nothing is run again."""
    record = (ROOT / "bench/dualmap/RESULTS.md").read_text(encoding="utf-8")
    servers = recorded(record, "comparison.conversation-7b")
    engines = recorded(record, "engines.a100-conversation-7b.arrival")
    for name, figure in (
        ("routing-capacity", capacity(servers, slo_s=SLO_S)),
        ("routing-hits", hits(servers)),
        ("routing-engines", capacity(engines, slo_s=SLO_S)),
    ):
        figure.savefig(folder / f"{name}.png", dpi=DPI, metadata={"Software": None})


def pool(folder: Path, work: Path) -> None:
    """Simulate an evening of two graphs, made from the disaggregated sample, on the sample's pool."""
    command = [*PENSTOCK, "simulate", "--pool", "manifests/samples/gpu-pool.yaml", "--output-dir", str(work)]
    for name, trace in POOLED.items():
        graph = yaml.safe_load((ROOT / "manifests/samples/disaggregated.yaml").read_text(encoding="utf-8"))
        graph["metadata"] = {"name": name, "labels": {"team": name}}
        graph["spec"]["planner"] = {"mode": "adaptive"}
        manifest = work / f"{name}.yaml"
        manifest.write_text(yaml.safe_dump(graph), encoding="utf-8")
        command += ["--manifest", str(manifest), "--trace", trace]
    run(command)
    shutil.copy(work / "pool.png", folder / "pool.png")


def recorded(record: str, section: str) -> list[dict[str, Any]]:
    """Return a section's rows of one policy at one rate, with the keys of `penstock simulate --json`."""
    text = record.partition(f"## {section}\n")[2].partition("\n## ")[0]
    table = text[text.index("| policy | QPS |") :].splitlines()
    names = [cell.strip() for cell in table[0].strip("|").split("|")]
    found = []
    for line in table[2:]:
        if not line.startswith("|"):
            break
        row = dict(zip(names, (cell.strip() for cell in line.strip("|").split("|")), strict=True))
        share, hit = _share(row["in time"]), _share(row["hits"])
        least, most = map(_share, row["seeds' range"].split(" to "))
        of_bound = _share(row["bound"])
        found.append(
            {
                "label": row["policy"],
                "qps": float(row["QPS"]),
                "on_time": share,
                "on_time_min": least,
                "on_time_max": most,
                "ttft_s": {"p90": _seconds(row["p90"])},
                "hit_rate": hit,
                "hit_bound": hit / of_bound,
                "imbalance_cv": float(row["CV"]),
            }
        )
    # By name, so that a policy has its colour in every picture.
    return sorted(found, key=lambda row: row["label"])


def _share(cell: str) -> float:
    return float(cell.removesuffix("%")) / 100


def _seconds(cell: str) -> float:
    value, unit = cell.split()
    return float(value) * {"s": 1.0, "ms": 0.001}[unit]


PARTS: Mapping[str, Callable[[Path, Path], None]] = {
    each.__name__: each for each in (notebook, routing, pool, tensorboard, page, demo)
}


def main() -> int:
    """Renew what is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default=",".join(PARTS), help="parts with commas between them [default: all]"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=ROOT / "docs/images",
        help="where the pictures go [default: docs/images]",
    )
    given = parser.parse_args()
    names = given.only.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--only {','.join(unknown)}: choose from {', '.join(PARTS)}")
    if CHROMIUM is None and {"page", "tensorboard"} & set(names):
        parser.error(
            "page and tensorboard need chromium on PATH: apt-get install chromium, or leave them out by --only"
        )
    given.folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        print(f"{name} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as work:
            PARTS[name](given.folder.absolute(), Path(work))
    return 0


if __name__ == "__main__":
    sys.exit(main())
