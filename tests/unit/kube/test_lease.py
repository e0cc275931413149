"""Elections by a Lease, and which pod a Lease belongs to."""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import suppress

import pytest

from penstock.core.errors import ClusterError, ConflictError, NotFoundError, UnavailableError
from penstock.kube.lease import Election, own_pod

TERM_S = 0.3


class Lease:
    """An API server that holds one Lease until it is told to answer no more."""

    def __init__(self):
        self.rng = random.Random(1)
        self.is_up = True
        self.stored = None
        self.calls = []
        self.refused = 0.0  # part of the calls that get 429
        self.retry_after_s = None

    def urgent(self):
        """Return the client whose calls do not wait."""
        return self

    async def get(self, kind, name, *, namespace):
        """Return the Lease."""
        self._called("get")
        if self.stored is None:
            raise NotFoundError("no such lease")
        return self.stored

    async def create(self, lease, *, field_manager):
        """Store the Lease."""
        self._called("create")
        self.stored = {**lease, "metadata": {**lease["metadata"], "resourceVersion": "1"}}
        return self.stored

    async def patch(self, kind, name, patch, *, namespace, field_manager):
        """Store a renewal."""
        self._called("patch")
        if patch["metadata"]["resourceVersion"] != self.stored["metadata"]["resourceVersion"]:
            raise ConflictError("another was first")
        version = str(int(self.stored["metadata"]["resourceVersion"]) + 1)
        self.stored = {
            "metadata": {**self.stored["metadata"], "resourceVersion": version},
            "spec": {**self.stored["spec"], **patch["spec"]},
        }
        return self.stored

    def _called(self, verb):
        self.calls.append((verb, time.monotonic()))
        if not self.is_up:
            raise ClusterError("no answer")
        if self.rng.random() < self.refused:
            raise UnavailableError("429: too many requests", retry_after_s=self.retry_after_s)


@pytest.fixture
def lease():
    """The API server."""
    return Lease()


@pytest.fixture
def election(lease):
    """A candidate with a short term."""
    return Election(lease, name="l", namespace="n", identity="me", duration_s=TERM_S)


async def until(predicate):
    """Wait until a condition holds."""
    while not predicate():  # noqa: ASYNC110 - the election sets no events
        await asyncio.sleep(0.005)


async def test_work_that_outlasts_its_leadership_is_named(lease, election):
    """While cancelled work continues after a lost Lease, the process says that only a restart helps; then no more."""
    starts, gate = [], asyncio.Event()

    async def work():
        starts.append(election.is_leading)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await gate.wait()  # as a close that waits for what never comes
            raise

    leading = asyncio.create_task(election.lead(work))
    await until(lambda: starts)
    assert election.overdue is None
    lease.is_up = False
    await until(lambda: election.overdue is not None)
    assert not election.is_leading
    assert "lease l: leadership ended" in election.overdue
    lease.is_up = True
    gate.set()
    await until(lambda: len(starts) == 2)
    assert election.overdue is None
    leading.cancel()
    with suppress(asyncio.CancelledError):
        await leading
    assert lease.stored["spec"]["holderIdentity"] == ""


async def test_work_that_ends_ends_the_leading(lease, election):
    """lead() returns when the work does, raises what it raises, and gives the lease back."""

    async def good():
        assert election.is_leading

    async def bad():
        raise UnavailableError("no metrics")

    await election.lead(good)
    with pytest.raises(UnavailableError, match="no metrics"):
        await election.lead(bad)
    assert lease.stored["spec"]["holderIdentity"] == ""
    assert not election.is_leading


async def test_a_foreign_clock_says_nothing(lease, election):
    """A lease renewed in 1999 by its holder's clock is respected for its complete term, counted by the candidate."""
    spec = {
        "holderIdentity": "other",
        "leaseDurationSeconds": 0.5,
        "renewTime": "1999-12-31T23:59:59.000000Z",
    }
    lease.stored = {"metadata": {"resourceVersion": "1"}, "spec": spec}
    started_s = time.monotonic()

    async def work():
        assert time.monotonic() - started_s >= 0.5

    await election.lead(work)


async def test_a_leader_renews_by_one_write(lease, election):
    """Reading first would double the chance that a busy API server refuses; another's write is seen as a conflict."""

    async def work():
        await until(lambda: len(lease.calls) >= 5)
        # Somebody labels it.
        lease.stored = {**lease.stored, "metadata": {**lease.stored["metadata"], "resourceVersion": "90"}}
        await until(lambda: len(lease.calls) >= 9)

    await election.lead(work)
    verbs = [verb for verb, _ in lease.calls]
    assert verbs[:5] == ["get", "create", "patch", "patch", "patch"]
    assert "get" in verbs[5:9]


async def test_the_term_counts_from_before_the_write(lease, election, monkeypatch):
    """A slow read before it takes nothing off the term."""
    read = lease.get

    async def slow(*args, **kwargs):
        await asyncio.sleep(0.5 * TERM_S)
        return await read(*args, **kwargs)

    monkeypatch.setattr(lease, "get", slow)
    left_s = []

    async def work():
        left_s.append(election._left_s())

    await election.lead(work)
    assert left_s[0] > 0.5 * TERM_S


async def test_a_leader_does_not_wait_as_long_as_the_server_asks(lease):
    """A second, the shortest Retry-After, would leave seven tries, all of which a busy server may refuse."""
    election = Election(lease, name="l", namespace="n", identity="me", duration_s=3.0)

    async def work():
        lease.refused, lease.retry_after_s = 1.0, 60.0
        count = len(lease.calls)
        await until(lambda: len(lease.calls) >= count + 2)
        lease.refused = 0.0

    await election.lead(work)


async def test_leadership_survives_a_server_that_refuses_seven_of_ten_calls(lease, monkeypatch):
    """Fifty terms of it, on a clock of the test: refused renewals are repeated in time."""
    now_s, sleep = [0.0], asyncio.sleep

    async def pass_time(pause_s):
        now_s[0] += pause_s
        await sleep(0)

    monkeypatch.setattr("penstock.kube.lease.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr("penstock.kube.lease.asyncio.sleep", pass_time)
    election = Election(lease, name="l", namespace="n", identity="me")
    starts = []

    async def work():
        starts.append(now_s[0])
        lease.refused, lease.retry_after_s = 0.7, 1.0  # as kube-apiserver asks
        while now_s[0] < starts[-1] + 50 * election.duration_s:
            await sleep(0)

    await election.lead(work)
    assert len(starts) == 1
    assert now_s[0] >= 750


POD = {"POD_NAME": "penstock-operator-1", "POD_NAMESPACE": "serving", "POD_UID": "u1"}


def test_a_lease_beside_its_holder_belongs_to_the_holders_pod():
    """Without blocking the pod's deletion."""
    expected = {"apiVersion": "v1", "kind": "Pod", "name": "penstock-operator-1", "uid": "u1"}
    assert own_pod(POD, "serving") == expected


@pytest.mark.parametrize("environment", [{}, {**POD, "POD_UID": ""}, {**POD, "POD_NAMESPACE": "elsewhere"}])
def test_outside_a_pod_or_in_another_namespace_it_belongs_to_none(environment):
    """An owner in another namespace counts as absent, and the Lease would be deleted at once."""
    assert own_pod(environment, "serving") is None
