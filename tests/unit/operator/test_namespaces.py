"""What podTemplates may have by the namespace's label."""

from __future__ import annotations

import copy

import pytest
from fake_api import FakeApi
from graph_harness import conditions, edit, graph, operator, to_rest

from penstock.core.errors import ConfigError, ForbiddenError, NotFoundError
from penstock_operator.namespaces import FRESH_S, NamespaceAllowances
from penstock_operator.resources.allowances import NOTHING, allowances_of, profiles_of

LABEL = "penstock.dev/pod-templates"
PROFILES = "rdma:hostIPC,capabilities=IPC_LOCK;cloud:serviceAccounts=weights-*,projectedTokens;none:"


class _Api:
    """One namespace, whose reads are counted."""

    def __init__(self, label=None):
        self.labels = {} if label is None else {LABEL: label}
        self.reads = 0
        self.error = None
        self.now_s = 0.0

    async def get(self, kind, name):
        assert (kind.kind, name) == ("Namespace", "ns")
        self.reads += 1
        if self.error is not None:
            raise self.error
        return {"metadata": {"name": name, "labels": self.labels}}


def reader(api, *, everywhere="", profiles=PROFILES):
    """Return what reads its label."""
    return NamespaceAllowances(
        api, everywhere=allowances_of(everywhere), profiles=profiles_of(profiles), now_s=lambda: api.now_s
    )


@pytest.mark.parametrize(
    ("label", "everywhere", "expected"),
    [
        (None, "hostPID", "hostPID"),
        ("rdma", "", "hostIPC,capabilities=IPC_LOCK"),
        ("rdma", "capabilities=SYS_NICE", "capabilities=SYS_NICE,hostIPC,capabilities=IPC_LOCK"),
        ("none", "hostPID", "hostPID"),
        ("unknown", "hostPID", "hostPID"),
    ],
)
async def test_a_labelled_namespace_has_its_profile_besides(label, everywhere, expected):
    """A label of no profile gives nothing."""
    assert await reader(_Api(label), everywhere=everywhere).of("ns") == allowances_of(expected)


async def test_without_profiles_no_namespace_is_read():
    """The operator may not: the chart grants it with a profile."""
    api = _Api("rdma")
    assert await reader(api, everywhere="hostPID", profiles="").of("ns") == allowances_of("hostPID")
    assert api.reads == 0


async def test_a_label_is_read_again_after_a_minute():
    """Not with every event of a graph."""
    api = _Api("rdma")
    found = reader(api)
    assert [(await found.of("ns")).has("hostIPC") for _ in range(5)] == [True] * 5
    assert api.reads == 1
    api.labels = {}
    api.now_s = FRESH_S
    assert await found.of("ns") == NOTHING
    assert api.reads == 2


@pytest.mark.parametrize("error", [ForbiddenError("403"), NotFoundError("404")])
async def test_what_was_read_last_counts_while_the_label_cannot_be_read(error):
    """A graph that serves continues; a namespace never read has what all have."""
    api = _Api("rdma")
    found = reader(api)
    assert (await found.of("ns")).has("hostIPC")
    api.error, api.now_s = error, FRESH_S
    assert (await found.of("ns")).has("hostIPC")
    fresh = _Api("rdma")
    fresh.error = error
    assert await reader(fresh).of("ns") == NOTHING


def test_a_profile_takes_no_secrets_away():
    """Without a list all are allowed, and a profile that names some adds none; alongside a list it adds its own."""
    named = allowances_of("secrets=weights")
    assert NOTHING.with_profile(named).holds("secrets", "other")
    both = allowances_of("secrets=own").with_profile(named)
    assert [both.holds("secrets", each) for each in ("own", "weights", "other")] == [True, True, False]
    assert not allowances_of("secrets=own").with_profile(NOTHING).holds("secrets", "other")


@pytest.mark.parametrize("text", ["rdma", ":hostIPC", "rdma:hostipc"])
def test_a_wrong_profile_is_refused(text):
    """With what to write."""
    with pytest.raises(ConfigError, match=r"write NAME:ENTRIES|hostNetwork"):
        profiles_of(text)


@pytest.mark.parametrize(("label", "reason"), [("rdma", "Healthy"), (None, "InvalidSpec")])
async def test_the_operator_builds_what_the_namespaces_profile_allows(label, reason):
    """The same graph is refused where the label is not."""
    api = FakeApi()
    labels = {} if label is None else {LABEL: label}
    api.objects["Namespace", None, "ns"] = {"metadata": {"name": "ns", "labels": labels}}
    await api.create(graph(), field_manager="user")
    services = copy.deepcopy(api.at("GraphDeployment", "g")["spec"]["services"])
    services["decode"]["podTemplate"] = {"spec": {"hostIPC": True}}
    edit(api, "GraphDeployment", "g", services=services)
    async with operator(api, pod_template_profiles=PROFILES) as made:
        await to_rest(api, made)
    assert conditions(api)["Degraded"]["reason"] == reason
    assert (("Deployment", "ns", "g-decode") in api.objects) is (reason == "Healthy")
