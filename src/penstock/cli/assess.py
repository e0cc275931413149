"""`penstock assess`: what Penstock would have saved on the load that a Prometheus has on record."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click

from penstock.api import SloConfig
from penstock.assess.assessment import Assessment, AssessOptions
from penstock.assess.assessment import assess as assessed
from penstock.assess.from_trace import observed_of_trace
from penstock.assess.history import QUERY_TIMEOUT_S, SETTING, PrometheusHistory
from penstock.assess.observed import COLD_START_S, Observed
from penstock.assess.page import write_files
from penstock.assess.reading import Subject, read_history
from penstock.assess.text import (
    CALIBRATION_HEADS,
    as_plain,
    calibration_rows,
    calibration_sentence,
    facts,
    fleet_heads,
    fleet_rows,
)
from penstock.cli import fields, option
from penstock.cli.progress import working
from penstock.cli.say import say, say_json
from penstock.cli.terminal import Terminal, printer, table, write_text
from penstock.cli.trace import mooncake_lines
from penstock.core.durations import duration_text, seconds_of
from penstock.core.errors import ConfigError, unwritable
from penstock.core.flags import attainment_flag, duration_flag, flag
from penstock.workload.access_log import Estimate, LogEstimates
from penstock.workload.synthetic import read_source
from penstock.workload.traces import Trace, load_access_log
from penstock_planner.sources.prometheus import connect


def _since(text: str) -> float:
    days, _, rest = text.partition("d") if "d" in text else ("0", "", text)
    return 86_400.0 * int(days) + (seconds_of(rest) if rest else 0.0)


def _estimate(text: str) -> Estimate:
    return Estimate.parse(text)


_ESTIMATE_FORM = "a number of tokens as 800, or bytes/N as bytes/4"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceOptions:
    """What is assessed."""

    prometheus: str | None = flag(
        "Prometheus server to read, as https://HOST:9090.",
        metavar="URL",
        unset="give --access-log or --trace",
    )
    model: str | None = flag("Model name in the metrics' labels.", unset="required with --prometheus")
    since_s: float = flag(
        "How far back to read, as 7d, 36h or 1d12h.",
        name="--since",
        default="7d",
        convert=_since,
        form="days, hours and minutes, as 7d, 36h or 1d12h",
        metavar="DURATION",
    )
    match: tuple[str, ...] = flag(
        'Further label matcher of the series, as namespace="prod"; repeatable.', default=(), metavar="MATCHER"
    )
    deployment: str | None = flag(
        "Deployment whose ready replicas kube-state-metrics counts.", unset="scraped processes are counted"
    )
    prometheus_credentials: str | None = flag(
        "File that gives tokens and certificates to servers, as `penstock planner run` takes it.",
        metavar="FILE",
        unset="none",
    )
    trace: str | None = flag(
        "Assess a trace instead: a file or a synthetic process, as `penstock simulate --trace`.",
        unset="give --prometheus",
    )
    access_log: str | None = flag(
        "Assess a gateway's access log instead: JSON lines of Penstock's router, Envoy or nginx.",
        metavar="FILE",
        unset="give --prometheus",
    )
    log_input_tokens: Estimate | None = flag(
        "Prompt tokens of logged requests without a count: a number, or bytes/N of the request's size.",
        convert=_estimate,
        form=_ESTIMATE_FORM,
        metavar="N|bytes/N",
        unset="a log without counts is refused",
    )
    log_output_tokens: Estimate | None = flag(
        "Generated tokens of logged requests without a count: a number, or bytes/N of the answer's size.",
        convert=_estimate,
        form=_ESTIMATE_FORM,
        metavar="N|bytes/N",
        unset="a log without counts is refused",
    )
    replicas: int | None = flag(
        "How many replicas served the trace or the log.",
        ge=1,
        unset="required with --trace; Prometheus knows them, and logs that name the workers",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """What is compared."""

    gpus_per_replica: int = flag("GPUs of one replica.", default=1, ge=1)
    ttft_slo_s: float | None = duration_flag(
        "TTFT that counts as on time.", name="--ttft-slo", gt=0, unset="5s"
    )
    itl_slo_s: float | None = duration_flag(
        "Mean gap between a request's tokens that counts as on time.", name="--itl-slo", gt=0, unset="any"
    )
    attainment: float | None = attainment_flag("Fraction of the requests to keep on time.", unset="0.99")
    cold_start_s: float = duration_flag(
        "Time from requesting a replica until it serves.",
        name="--cold-start",
        default=duration_text(COLD_START_S),
    )
    max_gpus: int | None = flag(
        "Maximum GPUs of the scaled fleets.", ge=1, unset="twice the peak of the fleet that ran"
    )
    profile: str | None = flag(
        "Latency profile of the engines, by name or .yaml path.",
        unset="the nearest one, scaled to the observed latencies",
    )
    gpu_price: float | None = flag("Price of one GPU-hour, in any currency.", gt=0, unset="no cost is shown")
    with_oracle: bool = flag(
        "Simulate an oracle that knows every arrival as well; takes minutes.", default=False
    )
    seeds: int = flag("How many traces to draw and simulate, with seeds 0, 1, …", default=3, ge=1)
    max_requests: int = flag(
        "Maximum number of requests to simulate; of a longer history the hours around the busiest minute.",
        default=20_000,
        ge=100,
    )
    jobs: int | None = flag("Number of processes.", ge=1, unset="one per core")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """What is written."""

    output_dir: Path | None = flag(
        "Folder for the page, the manifest and the engine's profile.",
        path="folder",
        unset="nothing is written",
    )
    trace_out: Path | None = flag(
        "File for the simulated trace, JSON lines in Mooncake's format.", path="file", unset="not written"
    )


@dataclass(frozen=True, slots=True)
class _Source:
    observed: Observed
    trace: Trace | None = None
    queries: int = 0


@click.command()
@fields.options(SourceOptions)
@fields.options(FleetOptions)
@fields.options(OutputOptions)
@option.as_json("Print the result as JSON, without progress.")
def assess(*, as_json: bool, **given: Any) -> None:
    """Estimate what Penstock would have saved on the load that a Prometheus has on record; it is only read.

    Example: penstock assess --prometheus http://localhost:9090 --model llama --since 7d --ttft-slo 2s --output-dir assessment
    """
    source, chosen, output = (
        fields.take(SourceOptions, given),
        fields.take(FleetOptions, given),
        fields.take(OutputOptions, given),
    )
    _check(source)
    options = _options(chosen)
    if output.output_dir is not None:
        _make(output.output_dir)
    with TemporaryDirectory() as scratch:
        folder = output.output_dir or Path(scratch)
        with working("reading", Terminal(stderr=True, quiet=as_json)) as show:
            read = _from_prometheus(source, show) if source.prometheus is not None else _from_trace(source)
            found = assessed(read.observed, options, folder, say=show, trace=read.trace)
        files = [] if output.output_dir is None else write_files(found, output.output_dir)
    if output.trace_out is not None:
        lines = "".join(f"{line}\n" for line in mooncake_lines(found.trace.requests))
        write_text(f"--trace-out {output.trace_out}", output.trace_out, lines)
        files.append(output.trace_out)
    if as_json:
        say_json(as_plain(found, [str(each) for each in files], queries=read.queries))
    else:
        _print(found, files)


def _check(source: SourceOptions) -> None:
    given = [source.prometheus, source.access_log, source.trace]
    if sum(each is not None for each in given) != 1:
        raise ConfigError("--prometheus, --access-log and --trace: give exactly one of them")
    if source.prometheus is not None and source.model is None:
        raise ConfigError("--model: required with --prometheus; give the model's name in the metrics' labels")
    if source.access_log is None and (source.log_input_tokens or source.log_output_tokens):
        raise ConfigError("--log-input-tokens and --log-output-tokens: only with --access-log")


def _options(chosen: FleetOptions) -> AssessOptions:
    return AssessOptions(
        slo=SloConfig().with_given(
            ttft_s=chosen.ttft_slo_s, itl_s=chosen.itl_slo_s, attainment=chosen.attainment
        ),
        gpus=chosen.gpus_per_replica,
        profile=chosen.profile,
        cold_start_s=chosen.cold_start_s,
        max_gpus=chosen.max_gpus,
        max_requests=chosen.max_requests,
        seeds=chosen.seeds,
        with_oracle=chosen.with_oracle,
        gpu_price=chosen.gpu_price,
        processes=chosen.jobs,
    )


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(unwritable(f"--output-dir {folder}", exc)) from exc


def _from_prometheus(source: SourceOptions, show: Any) -> _Source:
    assert source.prometheus is not None and source.model is not None  # noqa: S101, PT018 - checked before
    client = connect(
        source.prometheus, source.prometheus_credentials, timeout_s=QUERY_TIMEOUT_S, setting=SETTING
    )
    history = PrometheusHistory(client, on_query=lambda count: show(f"reading Prometheus, query {count}"))
    subject = Subject(source.model, source.match, source.deployment)
    observed = read_history(history, subject, end_s=time.time(), since_s=source.since_s)
    return _Source(observed, queries=history.queries)


def _from_trace(source: SourceOptions) -> _Source:
    if source.access_log is not None:
        estimates = LogEstimates(source.log_input_tokens, source.log_output_tokens)
        trace = load_access_log(source.access_log, estimates)
    else:
        assert source.trace is not None  # noqa: S101 - checked before
        trace = read_source(source.trace)
    observed = observed_of_trace(
        trace, model=source.model or "model", replicas=source.replicas, start_s=time.time() // 60 * 60
    )
    return _Source(observed, trace)


def _print(found: Assessment, files: list[Path]) -> None:
    say(found.recommendation.sentence)
    for reason in found.recommendation.reasons:
        say(f"  {reason}")
    say("")
    for name, value in facts(found):
        say(f"{name}: {value}")
    for note in found.observed.notes:
        say(f"note: {note}")
    say("")
    printer().print(table(fleet_heads(found), fleet_rows(found)))
    if found.calibration is not None:
        say("")
        say(calibration_sentence(found.calibration))
        printer().print(table(CALIBRATION_HEADS, calibration_rows(found.calibration, with_hours=True)))
    for path in files:
        say(f"wrote {path}")
