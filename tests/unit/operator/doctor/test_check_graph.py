"""One graph's findings, and what is asked for them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from doctor_facts import NOW_S, graph_facts, graph_object, router_page, worker_page

from penstock_operator.doctor.check_graph import graph_findings
from penstock_operator.doctor.facts import Page, Unreadable
from penstock_operator.doctor.findings import Severity
from penstock_operator.doctor.gather import pod_selector

sys.path.insert(0, str(Path(__file__).parent))


FORBIDDEN = Unreadable("403: you may not", is_forbidden=True)
BROKEN = Unreadable("502: connection refused")


def judged(**changes):
    """Severity, subject and message of what is not ok."""
    found = graph_findings(graph_facts(**changes), now_s=NOW_S, interval_s=6.0)
    return [(each.severity, each.subject, each.message) for each in found if each.severity is not Severity.OK]


def with_status(**status):
    """The graph with another status."""
    graph = graph_object()
    graph["status"] = {**graph["status"], **status}
    return graph


def condition(kind, status, reason="Why", message="because"):
    """One condition."""
    return {"type": kind, "status": status, "reason": reason, "message": message}


GRAPH = "graph serving/llama"
NOT_READY = {"conditions": [condition("Ready", "False")]}


@pytest.mark.parametrize(
    ("status", "expected"),
    [
        ({"observedGeneration": 0}, (Severity.PROBLEM, "no operator has reconciled it")),
        ({"observedGeneration": -1}, (Severity.PROBLEM, "no operator has reconciled it")),
        ({"observedGeneration": 1}, (Severity.WARNING, "its status is of generation 1, the newest is 2")),
        ({"phase": "Degraded", **NOT_READY}, (Severity.PROBLEM, "Ready is False: Why: because")),
        ({"phase": "Progressing", **NOT_READY}, (Severity.WARNING, "Ready is False: Why: because")),
        ({"phase": "Progressing", "conditions": []}, (Severity.WARNING, "is Progressing")),
        (
            {"conditions": [condition("Schedulable", "False", message="0/3 nodes")]},
            (Severity.PROBLEM, "Schedulable is False: Why: 0/3 nodes"),
        ),
        (
            {"conditions": [condition("BudgetRespected", "False", message="")]},
            (Severity.PROBLEM, "BudgetRespected is False: Why"),
        ),
        (
            {"conditions": [condition("Degraded", "True")]},
            (Severity.WARNING, "Degraded is True: Why: because"),
        ),
        (
            {"conditions": [condition("PlannerActive", "False")]},
            (Severity.WARNING, "PlannerActive is False: Why: because"),
        ),
        ({"conditions": [condition("Ready", "True"), condition("Degraded", "False")]}, None),
        ({"conditions": [condition("Unheard", "False")]}, None),
    ],
)
def test_conditions(status, expected):
    """What the operator says is repeated, with how bad it is; starting is not broken."""
    found = judged(graph=with_status(**status))
    assert found == ([] if expected is None else [(expected[0], GRAPH, expected[1])])


def test_no_router_is_ready():
    """No request is answered, whatever the workers do."""
    pods = graph_facts().pods[1:]
    assert judged(pods=pods) == [(Severity.PROBLEM, GRAPH, "no router is ready, so no request is answered")]


def test_a_graph_without_a_router_service():
    """Some bring their own."""
    graph = graph_object()
    del graph["spec"]["services"]["frontend"]
    assert judged(graph=graph, pods=graph_facts().pods[1:]) == []


@pytest.mark.parametrize(
    ("changes", "is_warned"),
    [
        ({}, False),
        ({"replicas": 2}, False),
        ({"replicas": 1}, True),
        ({"replicas": 1, "scaling": {"minReplicas": 1, "maxReplicas": 3}}, False),
        ({"scaling": {"minReplicas": 1, "maxReplicas": 1}}, True),
    ],
)
def test_one_router_is_warned_of(changes, is_warned):
    """It is away with its node; without a number there are two."""
    graph = graph_object()
    graph["spec"]["services"]["frontend"] |= changes
    message = "has one router, so no request is answered while its node is drained or it restarts"
    assert judged(graph=graph) == ([(Severity.WARNING, GRAPH, message)] if is_warned else [])


ROUTER = "router serving/llama-frontend-1"
NOT_SERVING = '{"status":"not ready","reasons":["no prefill worker is ready"]}'


@pytest.mark.parametrize(
    ("answer", "severity", "message"),
    [
        (BROKEN, Severity.PROBLEM, "/ready: 502: connection refused"),
        (FORBIDDEN, Severity.UNKNOWN, "/ready: 403: you may not"),
        (NOT_SERVING, Severity.PROBLEM, "cannot serve requests: no prefill worker is ready"),
        ("<html>", Severity.PROBLEM, "cannot serve requests: its response cannot be parsed: '<html>'"),
        ("[]", Severity.PROBLEM, "cannot serve requests: its response cannot be parsed: '[]'"),
        (None, Severity.PROBLEM, "/ready: was not queried"),
    ],
)
def test_a_routers_readiness(answer, severity, message):
    """/ready says whether a request would be served now."""
    assert judged(ready={"llama-frontend-1": answer}) == [(severity, ROUTER, message)]


def routed(first, later, ready=1, **changes):
    """Facts with one router's page."""
    pages = {
        **graph_facts().pages,
        "llama-frontend-1": Page(router_page(first, ready), router_page(later, ready)),
    }
    return judged(pages=pages, **changes)


BOTH = {"llama-prefill-1": 0.5, "llama-decode-1": 0.5}


@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        (0.5, None, "is ready, but the router does not know it; its EndpointSlice may be missing"),
        (4.5, 10.5, "its metrics are 10 s old, above planner.metrics.maxAgeSeconds 10"),
        (1, 7, "its metrics were not read again within 6 s"),
    ],
)
def test_what_a_router_knows_of_its_workers(first, later, message):
    """Each ready worker must be known, and its metrics fresh and read again between the looks."""
    looks = [
        {"llama-prefill-1": 0.5} | ({} if age is None else {"llama-decode-1": age}) for age in (first, later)
    ]
    assert routed(*looks) == [(Severity.PROBLEM, ROUTER, f"worker llama-decode-1: {message}")]


@pytest.mark.parametrize(
    ("came", "refused", "timed_out", "severity"),
    [(64, 30, 2, Severity.PROBLEM), (640, 1, 0, Severity.WARNING), (0, 3, 0, Severity.PROBLEM)],
)
def test_a_router_that_turns_requests_away(came, refused, timed_out, severity):
    """Overload is a finding: what was refused or timed out between the two observations, and what waits."""

    def page(arrivals, refusals, timeouts):
        return router_page(BOTH) + (
            f'penstock_router_arrivals_total{{model_name="m"}} {arrivals}\n'
            f'penstock_router_refused_requests_total{{model_name="m"}} {refusals}\n'
            f'penstock_router_queue_timeouts_total{{model_name="m"}} {timeouts}\n'
            'penstock_router_prefill_queue_requests{model_name="m"} 79\n'
        )

    pages = {
        **graph_facts().pages,
        "llama-frontend-1": Page(page(100, 7, 3), page(100 + came, 7 + refused, 3 + timed_out)),
    }
    message = f"rejected {refused + timed_out} of {came} requests within 6 s; 79 wait"
    assert judged(pages=pages) == [(severity, ROUTER, message)]


def test_prompts_whose_kv_does_not_reach_decode():
    """A connector that is none of NIXL's: everything is answered, and computed twice."""
    page = router_page(BOTH) + 'penstock_router_kv_transfers_total{result="none"} 40\n'
    pages = {**graph_facts().pages, "llama-frontend-1": Page(page, page)}
    message = (
        "of 40 prompts 40 were computed twice, because their KV did not come from prefill to decode "
        "(0 done, 40 none, 0 lost)"
    )
    assert (Severity.PROBLEM, ROUTER, message) in judged(pages=pages)


@pytest.mark.parametrize(
    ("below", "words"),
    [
        ({"0.67": 10, "1.5": 190, "+Inf": 200}, None),
        ({"0.67": 60, "1.5": 70, "+Inf": 90}, None),
        (
            {"0.67": 150, "1.5": 190, "+Inf": 200},
            "75% of its 200 prompts at 0.67 times or less of what workers count",
        ),
        (
            {"0.67": 0, "1.5": 20, "+Inf": 200},
            "90% of its 200 prompts at more than 1.5 times what workers count",
        ),
    ],
)
def test_prompts_that_cost_something_else_than_estimated(below, words):
    """A warning once the first prompts have taught the router, not before."""
    rows = [
        f'penstock_router_prompt_estimate_ratio_bucket{{model_name="m",le="{le}"}} {n}'
        for le, n in below.items()
    ]
    page = router_page(BOTH) + "\n".join((*rows, ""))
    pages = {**graph_facts().pages, "llama-frontend-1": Page(page, page)}
    found = [message for severity, _, message in judged(pages=pages) if severity is Severity.WARNING]
    assert [words in message for message in found] == ([] if words is None else [True])


def test_a_ready_worker_that_gets_nothing():
    """Ready for Kubernetes, not for the router."""
    found = routed(BOTH, BOTH, ready=0)
    assert [message for _, _, message in found] == [
        f"worker {name}: is ready, but the router sends nothing to it"
        for name in ("llama-prefill-1", "llama-decode-1")
    ]


def test_metrics_that_were_never_read():
    """The router knows the worker but not its load."""
    page = 'penstock_router_worker_ready{worker="llama-decode-1",role="decode"} 1\n' + router_page(
        {"llama-prefill-1": 0.1}
    )
    pages = {**graph_facts().pages, "llama-frontend-1": Page(page, page)}
    assert judged(pages=pages) == [
        (Severity.PROBLEM, ROUTER, "worker llama-decode-1: its metrics have never been read")
    ]


def test_pages_that_are_no_metrics():
    """A router's and a worker's are told apart by their subject."""
    broken = 'vllm:num_requests_running{engine="0"} many\npenstock_router_worker_ready{worker="a"} many\n'
    pages = {name: Page(broken, broken) for name in ("llama-frontend-1", "llama-decode-1")}
    assert judged(pages=pages) == [
        (Severity.PROBLEM, ROUTER, "/metrics cannot be read as Prometheus text"),
        (Severity.PROBLEM, "worker serving/llama-decode-1", "/metrics cannot be read as Prometheus text"),
    ]


WORKER = "worker serving/llama-decode-1"
NO_WORKER = "/metrics holds no vllm:num_requests_running, so its load is unknown"
RANK = worker_page(2, 7).replace('engine="0"', 'engine="1"')
STANDS_STILL = "has 2 requests in progress, but its token counters do not change"


@pytest.mark.parametrize(
    ("page", "severity", "message"),
    [
        (Page(BROKEN, BROKEN), Severity.PROBLEM, "/metrics: 502: connection refused"),
        (Page(worker_page(), BROKEN), Severity.PROBLEM, "/metrics: 502: connection refused"),
        (Page(FORBIDDEN, FORBIDDEN), Severity.UNKNOWN, "/metrics: 403: you may not"),
        (Page("up 1\n", "up 1\n"), Severity.PROBLEM, NO_WORKER),
        (Page(worker_page(3, 50), worker_page(2, 50)), Severity.PROBLEM, STANDS_STILL),
        (
            Page(worker_page(3, 50) + RANK, worker_page(2, 60) + RANK),
            Severity.PROBLEM,
            STANDS_STILL.replace("in progress", "in progress in data-parallel rank 1"),
        ),
    ],
)
def test_a_workers_page(page, severity, message):
    """It must be there, hold the series, and move while there is work."""
    assert judged(pages={**graph_facts().pages, "llama-decode-1": page}) == [(severity, WORKER, message)]


def test_dynamos_frontend_is_not_judged():
    """It has other series."""
    graph = graph_object()
    graph["spec"]["runtime"] = "dynamo"
    pages = {**graph_facts().pages, "llama-frontend-1": Page("up 1\n", "up 1\n")}
    assert judged(graph=graph, pages=pages, ready={}) == []


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (None, []),
        (3, []),
        (0, [(Severity.WARNING, "Prometheus http://p.m.svc:9090 holds no series of its workers")]),
        (BROKEN, [(Severity.WARNING, "Prometheus http://p.m.svc:9090: 502: connection refused")]),
        (FORBIDDEN, [(Severity.UNKNOWN, "Prometheus http://p.m.svc:9090: 403: you may not")]),
    ],
)
def test_prometheus(answer, expected):
    """Only where the graph names one; the router's page comes first anyway, so it is a warning."""
    graph = graph_object()
    graph["spec"]["planner"] = {"metrics": {"prometheusUrl": "http://p.m.svc:9090"}}
    found = judged(graph=graph, prometheus=answer)
    assert found == [(severity, GRAPH, message) for severity, message in expected]


RAW = {
    "metadata": {"name": "chat", "namespace": "serving"},
    "spec": {"services": {"prefill": {}, "decode": {}}},
}


@pytest.mark.parametrize(
    ("pod", "is_own"),
    [
        ("chat-decode-6b9f7c5d8-x2x7z", True),
        ("chat-prefill-0-1", True),
        ("chat-2-decode-6b9f7c5d8-x2x7z", False),
        ("chat-router-6b9f7c5d8-x2x7z", False),
    ],
)
def test_pods_of_a_graph_with_a_longer_name_are_not_its_own(pod, is_own):
    """Another graph's healthy workers would hide that this one's are not scraped."""
    selector = pod_selector(RAW)
    assert selector.startswith('namespace="serving",')
    expression = re.search(r'pod=~"(.*)"', selector)
    assert (re.fullmatch(expression[1], pod) is not None) is is_own
