"""What `gather` saw, `check` evaluates and `penstock doctor` says. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from penstock.operator.rbac import Right

REJECTED_SHARE: Final = 0.05
"""Chosen: a share of rejected requests from which a router is overloaded; below it, it was for a moment."""


class Severity(StrEnum):
    """How bad a finding is; the words are a contract of ``--json``."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        severity: problem: something does not work; unknown: it could not be looked at.
        subject: What it is about, such as ``graph serving/llama`` or ``API server``.
        message: What was found, one sentence without a full stop.
        remedy: What to do, a command where there is one; empty if nothing is to be done.
    """

    severity: Severity
    subject: str
    message: str
    remedy: str = ""


def ok(subject: str, message: str) -> Finding:
    """Return a finding that needs no remedy."""
    return Finding(Severity.OK, subject, message)


def warning(subject: str, message: str, remedy: str) -> Finding:
    """Return a finding that may become a problem."""
    return Finding(Severity.WARNING, subject, message, remedy)


def problem(subject: str, message: str, remedy: str) -> Finding:
    """Return a finding of something that does not work."""
    return Finding(Severity.PROBLEM, subject, message, remedy)


def unknown(subject: str, message: str, remedy: str) -> Finding:
    """Return a finding of something that could not be looked at."""
    return Finding(Severity.UNKNOWN, subject, message, remedy)


def is_healthy(findings: Iterable[Finding]) -> bool:
    """Whether no problem was found."""
    return all(each.severity is not Severity.PROBLEM for each in findings)


def counts(findings: Iterable[Finding]) -> dict[Severity, int]:
    """Return how many findings of each severity there are, all four named."""
    found = list(findings)
    return {severity: sum(each.severity is severity for each in found) for severity in Severity}


Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Something that could not be read.

    Attributes:
        why: The server's or the connection's own words.
        is_forbidden: Whether a right was missing, in place of an answer.
    """

    why: str
    is_forbidden: bool = False


@dataclass(frozen=True, slots=True)
class Absence:
    """Why no operator acts on a graph.

    Attributes:
        why: One sentence.
        remedy: What to do.
    """

    why: str
    remedy: str


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The API server.

    Attributes:
        url: Its address.
        version: Such as ``v1.34.4``.
        skew_s: This machine's clock less the server's, seconds; None if unknown. Exact to about a second.
    """

    url: str
    version: str | Unreadable
    skew_s: float | None = None


@dataclass(frozen=True, slots=True)
class LeaseFact:
    """One election's Lease, looked at twice.

    Attributes:
        component: ``operator`` or ``planner``.
        namespace: Where it lies.
        name: Its name.
        first: At the first look; None if there is none.
        later: At the second look.
        now_s: The server's clock at the second look, seconds since the epoch; None if unknown.
    """

    component: str
    namespace: str
    name: str
    first: Object | Unreadable | None
    later: Object | Unreadable | None
    now_s: float | None


@dataclass(frozen=True, slots=True)
class RightsFact:
    """What one account may not do.

    Attributes:
        who: ``you`` or ``system:serviceaccount:NAMESPACE:NAME``.
        component: ``operator`` or ``planner``; empty for the caller.
        namespace: Where it must; None: in all namespaces.
        asked: How many rights were asked for.
        missing: The ones that it lacks.
        unseen: Why it could not be asked; None if it could.
    """

    who: str
    component: str
    namespace: str | None
    asked: int
    missing: tuple[Right, ...] = ()
    unseen: Unreadable | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """A metrics page, read twice.

    Attributes:
        first: Text at the first look.
        later: Text at the second look.
    """

    first: str | Unreadable
    later: str | Unreadable


@dataclass(frozen=True, slots=True)
class GraphFacts:
    """One graph and what its processes say.

    Attributes:
        graph: The GraphDeployment.
        pods: Its pods.
        ready: By router pod, what its /ready answers.
        pages: By pod, its /metrics; at most `gather.MAX_PAGES` of them.
        prometheus: Number of workers' series in the configured Prometheus; None if none is configured.
    """

    graph: Object
    pods: tuple[Object, ...] | Unreadable = ()
    ready: Mapping[str, str | Unreadable] = field(default_factory=dict)
    pages: Mapping[str, Page] = field(default_factory=dict)
    prometheus: int | Unreadable | None = None


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """Nodes and what runs on them.

    Attributes:
        nodes: All nodes.
        requested: By node, extended resources that its pods asked for.
    """

    nodes: tuple[Object, ...] | Unreadable
    requested: Mapping[str, Mapping[str, int]] | Unreadable


@dataclass(frozen=True, slots=True)
class Facts:
    """All that was seen.

    Attributes:
        server: The API server.
        crds: By name, the live CustomResourceDefinition; None if absent.
        deployments: Operator and planner Deployments, wherever they could be looked for.
        leases: Of the elections that those Deployments hold.
        rights: What the caller, operator and planner may do.
        graphs: The graphs that were asked for.
        profiles: The ProfileRequests beside them.
        nodes: Nodes and requests.
        now_s: This machine's clock at the second look, corrected by the skew; seconds since the epoch.
        interval_s: Time between the two looks, real seconds.
        version: Penstock's, of this program.
    """

    server: ServerFacts
    crds: Mapping[str, Object | Unreadable | None]
    deployments: tuple[Object, ...] | Unreadable
    leases: tuple[LeaseFact, ...]
    rights: tuple[RightsFact, ...]
    graphs: tuple[GraphFacts, ...] | Unreadable
    profiles: tuple[Object, ...] | Unreadable
    nodes: NodeFacts
    now_s: float
    interval_s: float
    version: str
