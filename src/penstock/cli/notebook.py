"""The public module `penstock`: graphs, traces and simulations for notebooks and scripts.

`penstock/__init__.py` imports it on first use. Options are the fields of `SimulateOptions`, named as the flags of
`penstock simulate`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.api import GraphDeployment
from penstock.api.manifests import load_graph
from penstock.core.errors import ConfigError
from penstock.simulator.output import to_json
from penstock.simulator.plan import SimulateOptions, make_plan, run_plan
from penstock.workload.traces import Trace, load_trace

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Comparison", "compare", "load_graph", "load_trace", "simulate"]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What `penstock simulate --json` prints, as plain data."""

    result: dict[str, Any]

    @property
    def summary(self) -> list[dict[str, Any]]:
        """One row per policy or planner and rate, means over the seeds."""
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
    graph: GraphDeployment | Path | str | None = None,
    trace: Trace | Path | str = "mooncake",
    *,
    processes: int = 1,
    **options: Any,
) -> Comparison:
    """Serve a trace in virtual time.

    Args:
        graph: Gives workers, router and planner; a manifest's path, or None: four prefill and four decode workers.
        trace: As `load_trace` returns it, a file, or a synthetic process such as ``poisson:rate=4,count=2000``.
        processes: Cores to use; more than one needs a script whose main part is guarded.
        options: Fields of `SimulateOptions`; the router's policy is the graph's, or least-loaded, unless given.

    Raises:
        ConfigError: an option is out of bounds or contradicts another.
        InvalidSpecError: the manifest has problems.
        TypeError: there is no such option.
    """
    graph = load_graph(graph) if isinstance(graph, (str, Path)) else graph
    policy = "least-loaded" if graph is None else graph.spec.router.policy
    source = trace.name if isinstance(trace, Trace) else str(trace)
    plan = make_plan(SimulateOptions(**{"policy": policy, **options}, trace=source), graph=graph)
    return Comparison(json.loads(to_json(run_plan(plan, processes=processes))))


def compare(
    graph: GraphDeployment | Path | str | None = None,
    trace: Trace | Path | str = "mooncake",
    *,
    policies: Sequence[str] = (),
    planners: Sequence[str] = (),
    **options: Any,
) -> Comparison:
    """Serve one trace under several router policies or planners, ``all`` of them unless named; else as with `simulate`.

    Without policies, planners are compared with the graph's policy; without planners, nothing scales.
    """
    if policies or not planners:
        options["policy"] = ",".join(policies) or "all"
    return simulate(graph, trace, planners=tuple(planners), **options)
