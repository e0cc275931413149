"""Queues of a policy before idle workers."""

from penstock.router.core.dispatch_queue import DispatchQueue
from penstock.router.core.waiting import QueueSettings
from penstock.router.policy.routing_policy import Arrival, WorkerLoad

PACE = 1000.0


def placement(policy, names=("a", "b", "c", "d"), **settings):
    """Return queues over some workers, at a known rate of 1,000 tokens/s where nothing else is said."""
    queues = DispatchQueue(policy, QueueSettings(**{"tokens_per_s": PACE, **settings}))
    queues.set_workers(map(WorkerLoad, names), 0.0)
    return queues


def where(queues):
    """Return the worker of each queued item."""
    return {each.item: each.worker for each in queues.waiting_requests()}


def arrival(*chain, tokens=None, **more):
    """Return a request whose blocks hold 512 tokens each."""
    return Arrival(tuple(chain), len(chain) * 512 if tokens is None else tokens, **more)


def send(queues, item, request, now_s=0.0):
    """Queue a request and dispatch what can be; return its worker."""
    queues.submit(item, request, now_s)
    list(queues.dispatch(now_s))
    return queues.worker_of(item)


def compute(queues, item, request, now_s=0.0, end_s=None):
    """Send a request whose prompt is computed, at once where nothing else is said; return its worker."""
    worker = send(queues, item, request, now_s)
    queues.prefilled(item, now_s if end_s is None else end_s)
    return worker
