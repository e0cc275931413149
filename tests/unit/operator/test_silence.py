"""A planner that is gone cannot say so: the operator does, and only then."""

import pytest
from fake_api import FakeApi

from penstock.kube.kinds import GRAPH_DEPLOYMENT
from penstock_operator.silence import REPEAT_S, SILENT_S, PlannerLeaseMonitor

OBSERVING = {"type": "PlannerActive", "status": "True", "reason": "Observing", "message": "decides every 2 s"}


class World:
    """A clock, a Lease and two graphs, one of them without a planner."""

    def __init__(self):
        self.api = FakeApi()
        self.at_s = 1000.0
        self.silence = PlannerLeaseMonitor(
            self.api,
            ("ns", "penstock-planner"),
            namespace="ns",
            operator_class="penstock",
            now_s=lambda: self.at_s,
            wall_s=lambda: 1_800_000_000.0,
        )

    async def start(self):
        """Create the graphs."""
        for name, planner in (("llama", {}), ("fixed", {"enabled": False}), ("other", {})):
            graph = {
                "apiVersion": GRAPH_DEPLOYMENT.api_version,
                "kind": "GraphDeployment",
                "metadata": {"name": name, "namespace": "ns"},
                "spec": {"planner": planner} | ({"operatorClass": "x"} if name == "other" else {}),
            }
            await self.api.create(graph, field_manager="test")
            self.planner_says(name)

    def planner_says(self, name="llama"):
        """Let a planner write its condition."""
        self.api.at("GraphDeployment", name)["status"] = {"conditions": [OBSERVING]}

    def lease(self, renewed, holder="planner-1"):
        """Renew the Lease."""
        spec = {"renewTime": renewed, "holderIdentity": holder}
        self.api.objects["Lease", "ns", "penstock-planner"] = {"metadata": {}, "spec": spec}

    def reasons(self):
        """Return what each graph says."""
        return {
            name: self.api.at("GraphDeployment", name)["status"]["conditions"][0]["reason"]
            for name in ("llama", "fixed", "other")
        }

    async def after(self, seconds):
        """Look again, this much later."""
        self.at_s += seconds
        await self.silence.check()


@pytest.fixture(name="world")
async def _world():
    made = World()
    await made.start()
    return made


CALM = dict.fromkeys(("llama", "fixed", "other"), "Observing")
SILENT = CALM | {"llama": "PlannerSilent"}


async def test_a_planner_that_renews_is_believed(world):
    """However long it runs."""
    for second in range(0, 300, 5):
        world.lease(f"2027-01-15T08:{second // 60:02}:{second % 60:02}.000000Z")
        await world.after(5)
    assert world.reasons() == CALM


@pytest.mark.parametrize("left", ["as it was", "given back", "absent"])
async def test_a_lease_that_nobody_renews_is_said_in_graphs_that_have_a_planner(world, left):
    """Killed, scaled to zero, or never started; a graph without a planner, or of another class, is left alone."""
    world.lease("2027-01-15T08:00:00.000000Z")
    await world.after(0)
    if left == "given back":
        world.lease("2027-01-15T08:00:01.000000Z", holder="")
    elif left == "absent":
        del world.api.objects["Lease", "ns", "penstock-planner"]
    await world.after(5)
    await world.after(SILENT_S - 5)
    assert world.reasons() == (SILENT if left == "as it was" else CALM)
    await world.after(5)
    assert world.reasons() == SILENT
    (condition,) = world.api.at("GraphDeployment", "llama")["status"]["conditions"]
    assert condition["status"] == "Unknown"
    assert "no planner has renewed Lease ns/penstock-planner for 45 s" in condition["message"]


async def test_the_next_planner_is_believed_and_its_end_is_said_again(world):
    """It overwrites the condition; that it does is not a sign of a planner without a Lease."""
    world.lease("2027-01-15T08:00:00.000000Z")
    await world.after(0)
    await world.after(SILENT_S)
    assert world.reasons() == SILENT
    world.planner_says()
    world.lease("2027-01-15T08:05:00.000000Z", holder="planner-2")
    await world.after(5)
    assert world.reasons() == CALM
    await world.after(SILENT_S)
    assert world.reasons() == SILENT


async def test_a_planner_without_a_lease_that_overwrites_it_is_left_in_peace(world):
    """Such as one started by hand for one graph: said once, and not again."""
    await world.after(0)
    await world.after(SILENT_S)
    assert world.reasons() == SILENT
    world.planner_says()
    for _ in range(3):
        await world.after(REPEAT_S)
        assert world.reasons() == CALM
