"""A rate that no fleet can serve is named, with the rate that one could."""

import orjson
import pytest
from click.testing import CliRunner

from penstock.cli.main import cli

LOAD = ("--policy", "least-loaded", "--json", "--jobs", "1")


def notes(*arguments):
    """Return what a simulation says of itself."""
    result = CliRunner().invoke(cli, ["simulate", *arguments, *LOAD], catch_exceptions=False)
    return [each for each in orjson.loads(result.stdout)["notes"] if "beyond every fleet" in each]


def test_a_rate_beyond_the_workers_is_named_once():
    """Two rates are tried; only the one that a worker cannot compute is named, with one that it can."""
    trace = ("--trace", "gamma:rate=30,count=100,cv=1", "--aggregated", "1")
    (said,) = notes(*trace, "--rate", "2,30")
    assert said.startswith("30 requests/s are beyond every fleet here")
    assert "1 aggregated worker, the most that the GPUs allow" in said
    bound = float(said.rpartition(" below ")[2])
    assert notes(*trace, "--rate", str(0.95 * bound)) == []


@pytest.mark.parametrize(("gpus", "is_named"), [("8", True), ("16", False)])
def test_a_planners_budget_counts_instead_of_the_workers_at_the_start(gpus, is_named):
    """Eight GPUs are seven prefill workers, sixteen are fifteen."""
    found = notes("--trace", "gamma:rate=60,count=100,cv=1", "--planner", "--max-gpus", gpus)
    assert bool(found) is is_named
