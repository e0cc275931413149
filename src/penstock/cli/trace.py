"""`penstock trace`: what a trace asks for, and the same requests as a trace that others read."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from penstock.cli import fields, option
from penstock.cli.say import say, say_json
from penstock.cli.terminal import Terminal, table, write_text
from penstock.core.errors import ConfigError, unwritable
from penstock.core.flags import flag
from penstock.workload.arrivals import Selection, rescale, select
from penstock.workload.synthetic import read_source
from penstock.workload.trace_info import Lengths, TraceInfo, describe_trace
from penstock.workload.traces import (
    BLOCK_TOKENS_HELP,
    BLOCK_TOKENS_UNSET,
    OnBadRow,
    Trace,
    TraceRequest,
)

_BARS: Final = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True, slots=True)
class SourceFlags:
    """How a trace is read."""

    block_tokens: int | None = flag(BLOCK_TOKENS_HELP, ge=1, unset=BLOCK_TOKENS_UNSET)
    on_bad_row: OnBadRow = flag("What to do with rows that cannot be read.", default=OnBadRow.REFUSE)
    seed: int = flag("Seed for a synthetic process and for sampling.", default=0)

    def read(self, source: str) -> Trace:
        """Return the trace."""
        return read_source(source, on_bad_row=self.on_bad_row, block_tokens=self.block_tokens, seed=self.seed)


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """What `penstock trace convert` takes from a trace."""

    output: Path = flag("File to write, JSON lines in Mooncake's format.", path="file")
    source: SourceFlags = field(default_factory=SourceFlags)
    selection: Selection = field(default_factory=Selection)
    rate_rps: float | None = flag(
        "Mean arrivals per second; the trace's times are scaled to match.",
        name="--rate",
        gt=0,
        metavar="RPS",
        unset="the trace's",
    )


@click.group()
def trace() -> None:
    """Inspect or convert a trace, in any format that `penstock load` and `penstock simulate` read."""


@trace.command()
@click.argument("source", metavar="TRACE")
@fields.options(SourceFlags)
@click.option(
    "--picture",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Draw rate, reuse and lengths into this file, as .png or .svg; needs penstock[plots].  [default: no picture]",
)
@option.as_json("Print JSON.")
def info(source: str, picture: Path | None, as_json: bool, **options: Any) -> None:
    """Print the rate, the lengths and the reuse of TRACE: a file, `mooncake`, or a synthetic process.

    Example: penstock trace info mooncake --picture mooncake.png
    """
    found = fields.take(SourceFlags, options).read(source)
    described = describe_trace(found)
    if picture is not None:
        _draw(picture, found, described)
    if as_json:
        say_json(_plain(found, described))
    else:
        _print(found, described)


@trace.command()
@click.argument("source", metavar="TRACE")
@fields.options(ConvertOptions)
def convert(source: str, **options: Any) -> None:
    """Write TRACE, or a part of it, as JSON lines that Penstock, AIPerf and Dynamo read.

    Times are milliseconds from the first selected request; each hash id covers 512 tokens.

    Example: penstock trace convert BurstGPT_1.csv --duration-s 3600 --rate 2 --output hour.jsonl
    """
    chosen = fields.take(ConvertOptions, options)
    found = chosen.source.read(source)
    requests, truncated, dropped = select(found.requests, chosen.selection, seed=chosen.source.seed)
    kept, _ = rescale(requests, rate_rps=chosen.rate_rps)
    text = "".join(f"{line}\n" for line in mooncake_lines(kept))
    write_text(f"--output {chosen.output}", chosen.output, text)
    changes = [f"{count:,} {what}" for count, what in ((truncated, "cut"), (dropped, "left out")) if count]
    more = f" ({', '.join(changes)})" if changes else ""
    say(f"wrote {len(kept):,} of {len(found.requests):,} requests to {chosen.output}{more}", err=True)
    _say_skipped(found)


def mooncake_lines(requests: Iterable[TraceRequest]) -> Iterator[str]:
    """Yield each request as a line of Mooncake's format, times from the first one's."""
    zero_s: float | None = None
    for request in requests:
        zero_s = request.arrival_s if zero_s is None else zero_s
        row: dict[str, Any] = {
            "timestamp": round((request.arrival_s - zero_s) * 1000, 3),
            "input_length": request.input_tokens,
            "output_length": request.output_tokens,
        }
        if request.block_ids is not None:
            row["hash_ids"] = list(request.block_ids)
        if request.tier is not None:
            row["tier"] = request.tier.value
        yield json.dumps(row)


def _draw(path: Path, found: Trace, described: TraceInfo) -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--picture: needs matplotlib; pip install 'penstock[plots]', or leave it out")
    from penstock.report.trace_picture import draw_trace  # noqa: PLC0415 - matplotlib is an extra

    try:
        draw_trace(Path(found.name).name, described, found.requests).savefig(path)
    except (OSError, ValueError) as exc:
        why = unwritable(f"--picture {path}", exc) if isinstance(exc, OSError) else f"--picture {path}: {exc}"
        raise ConfigError(why) from exc


def _plain(found: Trace, described: TraceInfo) -> dict[str, Any]:
    return {
        "name": found.name,
        "format": found.format.value,
        "sha256": found.sha256,
        "hash_tokens": None if described.reuse is None else found.hash_tokens,
        "skipped_rows": {str(line): why for line, why in found.skipped.items()},
        "is_batched": found.is_batched,
        **asdict(described),
        "peak_rps": described.peak_rps,
    }


def _print(found: Trace, described: TraceInfo) -> None:
    say(f"{found.name}: {found.format.value}, {described.requests:,} requests in {described.span_s:,.1f} s")
    rate, peak = described.rate_rps, described.peak_rps
    if rate is not None and peak is not None:
        gaps = "" if described.gap_cv is None else f", gaps vary by {described.gap_cv:.2f} of their mean"
        batches = " (batches of equal time)" if found.is_batched else ""
        say(f"rate {rate:.3g} requests/s, at most {peak:.3g} in {described.span_s / 60:.3g} s{gaps}{batches}")
        say(f"  {_bars([each.rps for each in described.windows])}")
    rows = [_row("prompt tokens", described.prompts), _row("output tokens", described.answers)]
    Terminal().print(table(("", "mean", "p50", "p90", "p99", "most", "total"), rows, justify="right"))
    reuse = described.reuse
    if reuse is None:
        say("reuse unknown: no row has hash_ids; every prompt counts as its own")
    else:
        say(
            f"reuse {reuse.tokens_fraction:.1%} of the prompt tokens, in {reuse.requests_fraction:.1%} of the requests;"
            f" {reuse.distinct_tokens:,} distinct tokens (an id is {found.hash_tokens} tokens)"
        )
    if described.tiers:
        unnamed = described.requests - sum(described.tiers.values())
        asked = [f"{count:,} {tier}" for tier, count in described.tiers.items()]
        say(f"tiers: {', '.join(asked)}{f', {unnamed:,} name none' if unnamed else ''}")
    _say_skipped(found)


def _say_skipped(found: Trace) -> None:
    if found.skipped:
        line, why = next(iter(found.skipped.items()))
        say(f"{len(found.skipped):,} rows left out, the first in line {line}: {why}", err=True)


def _row(name: str, lengths: Lengths) -> tuple[str, ...]:
    whole = (lengths.p50, lengths.p90, lengths.p99, lengths.most, lengths.total)
    return (name, f"{lengths.mean:,.0f}", *(f"{each:,}" for each in whole))


def _bars(values: list[float]) -> str:
    top = max(values) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int(value / top * len(_BARS)))] for value in values)
