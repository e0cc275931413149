"""Probes of a container that serves HTTP.

A model may take minutes to load and a busy worker seconds to answer, so starting, being ready and being
dead are judged by three different patiences.
"""

from __future__ import annotations

import math
from typing import Any

from penstock.api import Role
from penstock.kube.objects.names import HTTP_PORT

_STARTUP_PERIOD_S = 2
"""Chosen: a worker takes requests at most this long after it could."""

_LIVENESS_PERIOD_S = 10

_KILL_GRACE_S = 30
"""A process that liveness gave up has nothing to finish; the pod's own grace may be many minutes."""


def probes(role: Role, path: str, startup_s: float, liveness_s: float) -> dict[str, Any]:
    """Return startup, readiness and liveness probe.

    Args:
        role: Whose container it is.
        path: Answers 200 while the process can serve.
        startup_s: Longest time to the first 200, in seconds.
        liveness_s: How long a container that served may give no 200, in seconds.
    """
    return {
        "startupProbe": {
            "httpGet": _get(path),
            "periodSeconds": _STARTUP_PERIOD_S,
            "timeoutSeconds": 5,
            "failureThreshold": max(1, math.ceil(startup_s / _STARTUP_PERIOD_S)),
        },
        "readinessProbe": {
            "httpGet": _get(path),
            "periodSeconds": 1 if role is Role.ROUTER else 2,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        # A worker in a long step answers late: one silence of 10 s says nothing.
        "livenessProbe": {
            "httpGet": _get(path),
            "periodSeconds": _LIVENESS_PERIOD_S,
            "timeoutSeconds": _LIVENESS_PERIOD_S,
            "failureThreshold": math.ceil(liveness_s / _LIVENESS_PERIOD_S),
            "terminationGracePeriodSeconds": _KILL_GRACE_S,
        },
    }


def _get(path: str) -> dict[str, Any]:
    return {"path": path, "port": HTTP_PORT}
