"""Shows the bench's result: tables on the terminal, and a self-contained page with pictures."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from penstock_report.drawing import DPI, LINE_COLOURS, blank_figure, legend_above
from penstock_report.html_parts import figure, page, table, text
from penstock_simulator.charts import capacity, hits
from penstock_simulator.text import COLUMNS, cells, goodput_text

CLAIM_HEADS = ("paper's claim", "paper", "here")


def show(result: Mapping[str, Any]) -> None:
    """Print goodputs and the table beside the paper's numbers."""
    console = Console(width=140)
    for name, part in result["parts"].items():
        if name.startswith(("elasticity", "staleness", "ablation")):
            _print_rows(console, part)
        else:
            _print_goodput(console, part)
    claims = Table(title="beside the paper's numbers", box=None, padding=(0, 2, 0, 0))
    for head in CLAIM_HEADS:
        claims.add_column(head)
    for claim in result["claims"]:
        claims.add_row(claim["claim"], claim["paper"], claim["here"])
    console.print(claims)


def _print_rows(console: Console, part: Mapping[str, Any]) -> None:
    printed = Table(title=part["title"], box=None, padding=(0, 2, 0, 0))
    shown = [place for place, head in enumerate(COLUMNS) if head not in {"seeds' range", "GPU-h", "lost"}]
    for place in shown:
        printed.add_column(COLUMNS[place], no_wrap=True)
    for row in part["summary"]:
        written = cells(row)
        printed.add_row(*(written[place] for place in shown))
    console.print(printed)


def _print_goodput(console: Console, part: Mapping[str, Any]) -> None:
    printed = Table(title=f"{part['title']}: goodput at 90%", box=None, padding=(0, 2, 0, 0))
    for head in ("policy", "requests/s", *(f"in time at {qps:g}" for qps in _rates(part))):
        printed.add_column(head, no_wrap=True)
    for row in sorted(part["goodput"], key=lambda row: -(row["goodput_rps"] or 0.0)):
        shares = {
            each["qps"]: each["capacity"] for each in part["summary"] if each["policy"] == row["policy"]
        }
        printed.add_row(
            row["policy"],
            goodput_text(row),
            *("" if qps not in shares else f"{shares[qps]:.3f}" for qps in _rates(part)),
        )
    console.print(printed)


def _rates(part: Mapping[str, Any]) -> list[float]:
    rates = sorted({row["qps"] for row in part["summary"]})
    return rates if len(rates) <= 8 else []


def write(result: Mapping[str, Any], directory: Path) -> None:
    """Write pictures and page."""
    parts = ["<h1>DualMap's evaluation, reproduced in virtual time</h1>"]
    parts.append(
        table(CLAIM_HEADS, [(claim["claim"], claim["paper"], claim["here"]) for claim in result["claims"]])
    )
    for name, part in result["parts"].items():
        parts.append(f"<h2>{text(part['title'])}</h2>")
        parts += [figure(path, {path.name: part["title"]}) for path in _pictures(name, part, directory)]
        parts.append(table(COLUMNS, [cells(row) for row in part["summary"]]))
        parts.append(
            table(("policy", "goodput"), [(row["policy"], goodput_text(row)) for row in part["goodput"]])
        )
    (directory / "dualmap.html").write_text(page("DualMap reproduced", parts), encoding="utf-8")


def markdown(result: Mapping[str, Any]) -> str:
    """Return the result as a document: the claims, then each part's goodputs and figures."""
    lines = ["| paper's claim | paper | here |", "|---|---|---|"]
    lines += [f"| {each['claim']} | {each['paper']} | {each['here']} |" for each in result["claims"]]
    if result["findings"]:
        lines += ["", "| two candidates ahead of all instances | |", "|---|---|"]
        lines += [
            f"| {key.removeprefix('staleness.')} | {said} |" for key, said in result["findings"].items()
        ]
    for name, part in result["parts"].items():
        lines += ["", f"## {name}", f"{part['title']}. {len(part['runs'])} runs.", ""]
        if not name.startswith(("elasticity", "staleness")):
            lines += ["| policy | goodput at 90%, requests/s (range over the seeds) |", "|---|---|"]
            ranked = sorted(part["goodput"], key=lambda row: -(row["goodput_rps"] or 0.0))
            lines += [f"| {row['policy']} | {goodput_text(row)} |" for row in ranked] + [""]
        shown = [place for place, head in enumerate(COLUMNS) if head not in {"GPU-h", "lost"}]
        lines += ["| " + " | ".join(COLUMNS[place] for place in shown) + " |", "|---" * len(shown) + "|"]
        for row in sorted(part["summary"], key=lambda row: (row["qps"] or 0.0, -row["capacity"])):
            written = cells(dict(row))
            # A label may hold the separator of columns.
            lines.append("| " + " | ".join(written[place].replace("|", ", ") for place in shown) + " |")
    return "\n".join(lines) + "\n"


def _pictures(name: str, part: Mapping[str, Any], directory: Path) -> list[Path]:
    drawn = {}
    if name.startswith(("comparison", "order", "ours", "scaling")):
        drawn[f"{name}.capacity.png"] = capacity(part["summary"], slo_s=5.0)
        drawn[f"{name}.hits.png"] = hits(part["summary"])
    elif name == "elasticity":
        drawn[f"{name}.png"] = _attainment(part)
    elif name.startswith("staleness"):
        drawn[f"{name}.png"] = _staleness(part)
    for file, picture in drawn.items():
        picture.savefig(directory / file, dpi=DPI, metadata={"Software": None})
    return [directory / file for file in drawn]


def _attainment(part: Mapping[str, Any]) -> Any:
    drawn = blank_figure("Share in time while instances join and leave (first seed)")
    panels = drawn.subplots(2, 1)
    for panel, label in zip(panels, ("4 to 8", "8 to 4"), strict=True):
        chosen = [run for run in part["runs"] if run["seed"] == 0 and run["policy"].endswith(label)]
        for run, colour in zip(chosen, LINE_COLOURS, strict=False):
            panel.plot(
                run["attainment"]["until_s"], run["attainment"]["share"], color=colour, label=run["policy"]
            )
        panel.set_ylim(0, 1.02)
        panel.set_ylabel(f"in time, {label}")
        panel.grid(alpha=0.25)
        legend_above(panel)
    panels[-1].set_xlabel("time (virtual s)")
    return drawn


def _staleness(part: Mapping[str, Any]) -> Any:
    drawn = blank_figure("Capacity against the number of routers (none of them sees the others' caches)")
    panels = drawn.subplots(1, 2, sharey=True)
    rows = [(*row["policy"].split("|"), row["capacity"]) for row in part["summary"]]
    policies = list(dict.fromkeys(row[0] for row in rows))
    for panel, delay in zip(panels, ("0", "2"), strict=True):
        for policy, colour in zip(policies, LINE_COLOURS, strict=False):
            points = [
                (int(r[1]), r[3]) for r in rows if r[0] == policy and (r[2] == delay or r[1] in {"1", "2"})
            ]
            panel.plot(*zip(*sorted(points), strict=True), marker="o", color=colour, label=policy)
        panel.set_xlabel(f"routers, news {delay} s old and a scrape each second")
        panel.grid(alpha=0.25)
        panel.set_ylim(0, 1.02)
    panels[0].set_ylabel("share in time")
    legend_above(panels[0])
    return drawn
