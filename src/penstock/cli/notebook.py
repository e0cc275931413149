"""The public module `penstock`: graphs, traces and simulations for notebooks and scripts.

`penstock/__init__.py` imports it on first use. Options are the fields of `SimulateOptions`, named as the flags of
`penstock simulate`; errors name them as they are written in Python.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypedDict, Unpack

from penstock.api import GraphDeployment, QueueOrder, RouterConfig
from penstock.api.manifests import load_graph
from penstock.core.closest import did_you_mean
from penstock.core.errors import ConfigError
from penstock.core.flags import flag_of, flags
from penstock.simulator.output import to_json
from penstock.simulator.plan import SimulateOptions, make_plan, run_plan
from penstock.simulator.scenario import Faults, Resize, WorkerFailure
from penstock.workload.arrivals import OnLong, Spread
from penstock.workload.traces import Trace, load_trace, trace_of_rows

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Comparison", "compare", "load_graph", "load_trace", "simulate"]

GraphLike: TypeAlias = GraphDeployment | Path | str
TraceLike: TypeAlias = "Trace | Path | str | pd.DataFrame | Iterable[Mapping[str, Any]]"


class SimulateKeywords(TypedDict, total=False):
    """Further options of `simulate` and `compare`: the flags of `penstock simulate`, whose help says what each does.

    Names with ``_s`` are virtual seconds, with ``_tokens`` tokens; ``seeds`` counts runs, and ``prefill``, ``decode`` and
    ``aggregated`` workers at time 0.
    """

    seeds: int
    prefill: int | None
    decode: int | None
    aggregated: int | None
    profile: str | None
    kv_tokens: int | None
    block_size: int
    max_gpus: int | None
    ledger: Path | None
    calendar_start: datetime | None
    cold_start_s: float
    resizes: tuple[Resize, ...]
    failures: tuple[WorkerFailure, ...]
    faults: Faults
    ttft_slo_s: float | None
    itl_slo_s: float | None
    attainment: float | None
    tiers: str | None
    propagation_delay_s: float
    routers: int | Sequence[int]
    pick_delay_s: float
    picker_death: float | Sequence[float]
    queue_order: QueueOrder | None
    no_rebalance: bool
    slot_tokens: int | None
    max_waiting: int | None
    max_wait_s: float | None
    admission: Mapping[str, Any]
    warmup: int
    limit: int | None
    max_input_tokens: int | None
    on_long: OnLong
    block_tokens: int | None
    spread: Spread | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `penstock simulate --json` prints, as plain data; times are virtual seconds, shares 0-1."""

    result: dict[str, Any]

    @property
    def summary(self) -> list[dict[str, Any]]:
        """One row per policy or planner and rate, means over the seeds; columns ``policy``, ``planner`` and ``label`` name it."""
        rows: list[dict[str, Any]] = self.result["summary"]
        return rows

    @property
    def runs(self) -> list[dict[str, Any]]:
        """One row per run."""
        rows: list[dict[str, Any]] = self.result["runs"]
        return rows

    def frame(self, *, runs: bool = False) -> pd.DataFrame:
        """Return the summary, or each run, as a pandas DataFrame; columns are named as ``ttft_s.p50``.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas as pd  # noqa: PLC0415 - optional, and slow to import
        except ModuleNotFoundError as exc:
            raise ConfigError(
                "pandas: not installed; pip install pandas, or read .summary and .runs"
            ) from exc
        return pd.json_normalize(self.runs if runs else self.summary)


def simulate(
    graph: GraphLike | None = None,
    trace: TraceLike = "mooncake",
    *,
    policy: str | Sequence[str] | None = None,
    rate_rps: float | Sequence[float] = (),
    planners: str | Sequence[str] = (),
    processes: int = 1,
    **options: Unpack[SimulateKeywords],
) -> Comparison:
    """Serve a trace in virtual time.

    Args:
        graph: Gives workers, router and planner; a manifest's path, or None: four prefill and four decode workers.
        trace: As `load_trace` returns it; a file; a synthetic process such as ``poisson:rate=4,count=2000``; or a table, a
            DataFrame or rows, shape (requests, 3 or 4): ``arrival_s`` (seconds, >= 0), ``input_tokens``, ``output_tokens``
            (>= 1), and maybe ``block_ids``, one id per begun 512 prompt tokens.
        policy: Router policies, one or several; None: the graph's, or the router's default, prefix-cost.
        rate_rps: Mean rates to try, requests/s, > 0, one or several; none: the trace's.
        planners: Let these scale; none: nothing scales.
        processes: Cores to use; more than one needs a script whose main part is guarded.
        options: See `SimulateKeywords`.

    Returns:
        One row of `Comparison.summary` for each policy or planner and rate, one of `Comparison.runs` for each seed too.

    Raises:
        ConfigError: an option is out of bounds or contradicts another, or the trace cannot be read.
        InvalidSpecError: the manifest has problems.
        TypeError: there is no such option.
    """
    _check_names(options, simulate)
    graph = load_graph(graph) if isinstance(graph, (str, Path)) else graph
    default = (RouterConfig() if graph is None else graph.spec.router).policy
    given: dict[str, Any] = {
        **options,
        "rate_rps": rate_rps,
        "policy": default if policy is None else ",".join(_names(policy)),
        "planners": _names(planners),
    }
    for name in _NUMBERS & given.keys():
        given[name] = (given[name],) if isinstance(given[name], (int, float)) else tuple(given[name])
    source = _trace(trace, given.get("block_tokens"))
    if isinstance(source, str):
        given["trace"] = source
    try:
        plan = make_plan(
            SimulateOptions(**given), graph=graph, trace=None if isinstance(source, str) else source
        )
        return Comparison(json.loads(to_json(run_plan(plan, processes=processes))))
    except ConfigError as exc:
        raise ConfigError(_in_python(str(exc))) from exc


def compare(
    graph: GraphLike | None = None,
    trace: TraceLike = "mooncake",
    *,
    policies: str | Sequence[str] = (),
    planners: str | Sequence[str] = (),
    rate_rps: float | Sequence[float] = (),
    processes: int = 1,
    **options: Unpack[SimulateKeywords],
) -> Comparison:
    """Serve one trace under several router policies or planners, ``all`` of them unless named; else as with `simulate`.

    Without policies, planners are compared with the graph's policy; without planners, nothing scales.

    Args:
        graph: As in `simulate`.
        trace: As in `simulate`.
        policies: Names as in a manifest, one or several.
        planners: Names, one or several.
        rate_rps: Mean rates to try, requests/s, > 0.
        processes: Cores to use.
        options: See `SimulateKeywords`.

    Returns:
        One row of `Comparison.summary` for each of them and rate.

    Raises:
        ConfigError: As in `simulate`.
        InvalidSpecError: the manifest has problems.
        TypeError: there is no such option.
    """
    _check_names(options, compare)
    policy: str | Sequence[str] | None = policies or (None if planners else "all")
    return simulate(
        graph, trace, policy=policy, planners=planners, rate_rps=rate_rps, processes=processes, **options
    )


def _check_names(options: Iterable[str], function: Callable[..., object]) -> None:
    """Refuse options that a function does not have.

    Raises:
        TypeError: there is one; the message suggests the name that was meant.
    """
    known = {*SimulateKeywords.__annotations__, *inspect.signature(function).parameters} - {"options"}
    for name in options:
        if name not in known:
            raise TypeError(f"{function.__name__}: there is no option {name}{did_you_mean(name, known)}")


_NUMBERS = frozenset({"rate_rps", "routers", "picker_death"})
"""Options that take one number or several."""


def _names(given: str | Sequence[str]) -> tuple[str, ...]:
    return tuple(given.split(",")) if isinstance(given, str) else tuple(given)


def _trace(given: TraceLike, block_tokens: int | None) -> Trace | str:
    """Return a trace that is there, or the name of one that is to be read."""
    if isinstance(given, Trace):
        if block_tokens not in {None, given.hash_tokens}:
            raise ConfigError(
                f"block_tokens: {block_tokens}, but the trace was read with {given.hash_tokens}; give it to load_trace"
            )
        return given
    if isinstance(given, (str, Path)):
        return str(given)
    if hasattr(given, "to_dict"):  # a DataFrame, without importing pandas
        given = given.to_dict(orient="records")
    return trace_of_rows(given)


def _in_python(message: str) -> str:
    """Return an error's text with arguments in place of the flags that it names."""
    spelled = {each.name or flag_of(name): name for name, each in flags(SimulateOptions).items()}
    return re.sub(r"--[a-z][a-z0-9-]*", lambda found: spelled.get(found[0], found[0]), message)
