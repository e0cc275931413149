"""A rollout of a graph whose wanted replicas exceed its GPU budget: it ends, and the services keep their GPUs."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.api import Role
from penstock.kube.objects.names import BUDGET_GATE
from penstock_operator.plan.budget import blocked, plan_ungating, reservations
from penstock_operator.plan.pods import PodView
from penstock_operator.plan.rollout import unavailable


class Rollout:
    """Two services, their Deployment controllers, an operator and the kubelets.

    The controller is that of kubernetes/pkg/controller/deployment/rolling.go without a surge: it deletes old pods
    that are not ready first, then ready ones while enough others are available.
    """

    def __init__(self, wanted, budget):
        self.wanted = wanted
        self.budget = budget
        self.revision = dict.fromkeys(wanted, "old")
        self.made_from = {}
        self.away = dict.fromkeys(wanted, 1)
        self.held = {}
        self.pods = {}
        self.born = 0

    def alive(self, service):
        """Return a service's pods that count as replicas."""
        return [pod for pod in self.pods.values() if pod.service == service and pod.alive]

    def control(self, service):
        """The Deployment controller takes a step."""
        pods = self.alive(service)
        for _ in range(self.wanted[service] - len(pods)):
            self.born += 1
            name = f"{service}-{self.born:03}"
            self.made_from[name] = self.revision[service]
            more = {"role": service, "gates": (BUDGET_GATE,), "gpus": 1}
            self.pods[name] = PodView(name, uid=name, service=service, created_s=float(self.born), **more)
        pods = self.alive(service)
        old = [pod for pod in pods if self.made_from[pod.name] != self.revision[service]]
        least = self.wanted[service] - self.away[service]
        unready_new = sum(not pod.ready for pod in pods if pod not in old)
        for pod in sorted(old, key=lambda each: each.ready)[: max(0, len(pods) - least - unready_new)]:
            available = sum(each.ready for each in self.alive(service))
            if not pod.ready or available > least:
                self.delete(pod)

    def delete(self, pod):
        """A pod without a node is gone at once; another one finishes its requests."""
        if pod.gated:
            del self.pods[pod.name]
        else:
            self.pods[pod.name] = replace(pod, terminating=True, ready=False)

    def operate(self):
        """The operator lifts gates and says how many replicas a rollout may take away."""
        pods = list(self.pods.values())
        found = plan_ungating(pods, budget=self.budget, priorities={}, held=self.held, now_s=0.0)
        counts = blocked(found, pods)
        for service in self.wanted:
            self.away[service] = unavailable(
                role=Role(service),
                gpus_per_replica=1,
                wanted_gpus=sum(self.wanted.values()),
                budget=self.budget,
                blocked=counts[service],
            )
        for uid in found.ungate:
            self.pods[uid] = replace(self.pods[uid], gates=())
        self.held = reservations(self.pods.values(), self.held, replicas=self.wanted, now_s=0.0)
        assert sum(not pod.gated for pod in self.pods.values()) <= self.budget

    def run(self, service):
        """The kubelets start what was released."""
        for pod in self.alive(service):
            self.pods[pod.name] = replace(pod, ready=not pod.gated)

    def end(self, service):
        """The pods that leave have finished their requests."""
        for pod in [each for each in self.pods.values() if each.service == service and each.terminating]:
            del self.pods[pod.name]

    def rest(self):
        """Let everything continue until nothing more can happen."""
        for _ in range(6 * sum(self.wanted.values())):
            before = dict(self.pods), dict(self.away), self.held
            for service in self.wanted:
                self.control(service)
                self.end(service)
                self.operate()
                self.run(service)
            if before == (self.pods, self.away, self.held):
                return

    def running(self):
        """Return the ready replicas by service."""
        return {service: sum(pod.ready for pod in self.alive(service)) for service in self.wanted}


STEPS = st.lists(
    st.tuples(st.sampled_from(["control", "run", "end", "operate"]), st.sampled_from(["decode", "prefill"])),
    max_size=40,
)


@settings(max_examples=150)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(0, 3), st.permutations(["decode", "prefill"]), STEPS)
def test_a_rollout_beyond_the_budget_ends_and_keeps_the_ratio(decode, prefill, beyond, order, steps):
    """Whichever service came first and whatever order things happen in, every old pod is replaced.

    Afterwards each service runs as many replicas as before, and at no instant the budget was exceeded.
    """
    wanted = {"decode": decode, "prefill": prefill}
    world = Rollout(wanted, max(2, decode + prefill - beyond))
    for service in order:
        world.control(service)
    world.rest()
    before = world.running()
    world.revision["decode"] = "new"
    for step, service in steps:
        world.operate() if step == "operate" else getattr(world, step)(service)
    world.rest()
    assert {world.made_from[pod.name] for pod in world.alive("decode")} == {"new"}
    assert world.running() == before
