"""A simulated worker's engine is the live one's: the command of runtime `simulated`, parsed as the worker parses it."""

from dataclasses import replace

import pytest

from penstock.api import GraphDeployment, Role
from penstock.cli.engine import serve
from penstock.engine.core.requests import EngineRole
from penstock.engine.serve.settings import ServeFlags, resolve
from penstock.runtimes.build import process_specs
from penstock.runtimes.protocol import RuntimeContext
from penstock.simulator.scenario import graph_pools
from penstock.simulator.servers import EngineModel


def live(argv):
    """Return the engine settings of a worker's command."""
    words = [word.replace("{port}", "8000") for word in argv]
    parameters = serve.make_context("serve", words[words.index("serve") + 1 :]).params
    return resolve(ServeFlags(role=EngineRole(parameters.pop("role")), **parameters)).engine


@pytest.mark.parametrize("roles", [("prefill", "decode"), ("aggregated",)])
@pytest.mark.parametrize(
    "section",
    [
        {},
        {"engine": {"kvBlocks": 9000, "blockTokens": 32, "maxBatchTokens": 4096, "maxRunningRequests": 32}},
        {"engine": {"maxRunningRequests": 9000}, "lease": {"durationSeconds": 12}},
        {
            "engine": {"preemption": {"maxPerRequest": 5, "premiumReservedFraction": 0.2}},
            "router": {"tiers": {"enabled": True}},
        },
        {"engine": {"profile": "h100-llama-3.3-70b-tp4"}},
    ],
)
def test_the_live_and_the_simulated_engine_have_the_same_settings(section, roles):
    """One notification of a simulated decode worker stands for those of all its ranks; all else is the same."""
    services = {role: {"role": role, "gpusPerReplica": 4} for role in roles}
    spec = {
        "model": {"name": "m"},
        "runtime": "simulated",
        "services": {"r": {"role": "router"}, **services},
        "planner": {"enabled": False},
        **section,
    }
    graph = GraphDeployment.model_validate({"metadata": {"name": "g"}, "spec": spec})
    commands = {
        each.role: each.argv for each in process_specs(graph, RuntimeContext("python", "g", "d", "n"))
    }
    for pool in graph_pools(graph):
        settings = EngineModel(pool.role, pool.model).settings
        # An aggregated worker lends no KV.
        lent = {"lease": settings.lease} if pool.role is Role.AGGREGATED else {}
        assert settings == replace(live(commands[pool.role]), ranks=1, **lent)
