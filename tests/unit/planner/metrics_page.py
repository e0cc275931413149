"""What the metrics page of a planner shows after a run."""

from __future__ import annotations

from penstock.core.exposition import parse_samples
from penstock.planner.metrics import PlannerMetrics


async def page_after(world, seconds):
    """Return a graph's numbers by name, without prefix, and the values of their other labels."""
    metrics = PlannerMetrics()
    figures = metrics.of("serving", "llama")
    figures.begin(world.config)
    world.watch(figures)
    await world.run_until(seconds)
    page = metrics.page().decode()
    names = {line.split()[2] for line in page.splitlines() if line.startswith("# TYPE penstock_")}
    return {
        (each.name.removeprefix("penstock_").removeprefix("planner_"), *_other_labels(each)): each.value
        for each in parse_samples(page, names)
    }


def _other_labels(sample):
    return (value for key, value in sample.labels.items() if key not in ("namespace", "graph"))
