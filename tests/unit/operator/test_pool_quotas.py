"""ResourceQuotas that are lower than a pool: which are told, how often they are read, and what failures lead to."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from penstock.core.errors import ForbiddenError, UnavailableError
from penstock.kube.kinds import RESOURCE_QUOTA
from penstock_operator.plan.pool_quotas import quota_problems
from penstock_operator.pool_quotas import PoolQuotaReader

GPU = "nvidia.com/gpu"


def quota(most, name="team", resource=GPU, **more):
    """A ResourceQuota on what pods request of a resource."""
    return {"metadata": {"name": name}, "spec": {"hard": {f"requests.{resource}": most}, **more}}


@pytest.mark.parametrize(
    ("quotas", "said"),
    [
        ([quota("4")], ["team"]),
        ([quota("4", "b"), quota("0", "a")], ["a", "b"]),
        ([quota("8")], []),
        ([quota("4", resource="amd.com/gpu")], []),
        ([quota("4", scopes=["BestEffort"])], []),
        ([quota("4", scopeSelector={"matchExpressions": []})], []),
        ([{"metadata": {"name": "empty"}}], []),
    ],
)
def test_a_quota_below_the_pool_is_named(quotas, said):
    """Of the pool's resource, for all pods; one as large as the pool is none."""
    assert [each.split()[1] for each in quota_problems(quotas, GPU, 8)] == said


def test_the_sentence_names_both_numbers_and_what_to_do():
    """A condition's text."""
    assert quota_problems([quota("4")], GPU, 8) == [
        (
            "ResourceQuota team allows 4 nvidia.com/gpu, fewer than the pool's 8, so granted workers are refused; raise it or lower "
            "spec.gpus"
        )
    ]


@pytest.fixture
def world(monkeypatch):
    """A reader with its clock and what the API server answers: quotas, or an error."""
    now, calls = [0.0], []
    monkeypatch.setattr("penstock_operator.polled.time.monotonic", lambda: now[0])
    found = SimpleNamespace(now=now, calls=calls, answer=[quota("4")])

    async def read(kind, *, namespace):
        calls.append((kind, namespace))
        if isinstance(found.answer, Exception):
            raise found.answer
        return SimpleNamespace(items=found.answer)

    reader = PoolQuotaReader(SimpleNamespace(list=read))
    found.reader = reader
    found.said = lambda: reader.problems(GPU, "ns", 8)
    return found


async def test_a_clusters_pool_is_compared_with_what_it_guarantees_in_each_namespace(world):
    """A quota of one tenant is below the whole pool as a rule, and no problem."""
    assert await world.reader.cluster_problems(GPU, {"b": 3, "a": 6}) == [
        (
            "ResourceQuota a/team allows 4 nvidia.com/gpu, fewer than the 6 guaranteed to graphs there, so granted workers are "
            "refused; raise it or lower guaranteedGpus"
        )
    ]
    assert world.calls == [(RESOURCE_QUOTA, "a"), (RESOURCE_QUOTA, "b")]


async def test_quotas_are_read_once_a_minute(world):
    """A pool is shared out every second or so."""
    assert len(await world.said()) == 1
    world.answer, world.now[0] = [], 59.0
    assert len(await world.said()) == 1
    assert world.calls == [(RESOURCE_QUOTA, "ns")]
    world.now[0] = 60.0
    assert await world.said() == []


@pytest.mark.parametrize(("answer", "said"), [(ForbiddenError("403"), 0), (UnavailableError("503"), 1)])
async def test_what_cannot_be_read_stops_nothing(world, answer, said):
    """Without the right nothing is known; without an answer what was known stands."""
    await world.said()
    world.answer, world.now[0] = answer, 60.0
    assert len(await world.said()) == said
