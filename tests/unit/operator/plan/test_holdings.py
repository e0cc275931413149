"""What a service holds from look to look: kept through a replacement, given up after a while or a scale-down."""

from penstock.kube.objects.names import BUDGET_GATE
from penstock.operator.plan.budget import KEEP_S, Holding, holdings, lost
from penstock.operator.plan.pods import PodView

NOTHING = frozenset()


def pod(name, *, gated=False, **more):
    """Return a decode pod of two GPUs."""
    gates = (BUDGET_GATE,) if gated else ()
    return PodView(name, uid=name, service="decode", role="decode", gpus=2, gates=gates, **more)


def held(*pods, before=None, wanted=2, released=NOTHING, now_s=100.0):
    """Call `holdings` with defaults."""
    return holdings(pods, before or {}, already_released=released, replicas={"decode": wanted}, now_s=now_s)


def test_what_runs_starts_or_leaves_is_held():
    """A lifted gate counts before it is seen; a gated or finished pod holds nothing."""
    pods = (pod("a"), pod("b", gated=True), pod("c", finished=True), pod("d", terminating=True))
    assert held(*pods) == {"decode": Holding(2, 2)}
    assert held(*pods, released=frozenset({"b"}), wanted=3) == {"decode": Holding(3, 2)}


def test_a_lost_replica_is_kept_for_a_while():
    """From the moment that it was missed, until it is back or `KEEP_S` have passed."""
    both = held(pod("a"), pod("b"))
    missed = held(pod("a"), before=both)
    assert missed == {"decode": Holding(2, 2, 100.0)}
    assert lost(missed, [pod("a")], NOTHING) == {"decode": 1}
    assert held(pod("a"), before=missed, now_s=100.0 + KEEP_S - 0.1) == missed
    assert held(pod("a"), before=missed, now_s=100.0 + KEEP_S) == {"decode": Holding(1, 2)}
    assert held(pod("a"), pod("b"), before=missed, now_s=101.0) == both
    assert held(before=both) == {"decode": Holding(2, 2, 100.0)}


def test_what_is_no_longer_wanted_is_given_up_at_once():
    """A scale-down, and a service that the graph no longer has."""
    both = held(pod("a"), pod("b"))
    assert held(pod("a"), before=both, wanted=1) == {"decode": Holding(1, 2)}
    assert lost(held(pod("a"), pod("b"), wanted=1), [pod("a")], NOTHING) == {}
    assert holdings([], both, already_released=NOTHING, replicas={}, now_s=0.0) == {}
