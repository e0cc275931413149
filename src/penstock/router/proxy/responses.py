"""Rejects requests that refer to an earlier response, because only the worker that generated it may have it. Pure.

vLLM 0.32 stores responses in a worker's memory, and only with ``VLLM_ENABLE_RESPONSES_API_STORE=1``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from penstock.api import Role
from penstock.router.core.worker import Worker
from penstock.router.proxy.completion import RequestRefused

RESPONSES: Final = "/v1/responses/"
_SHOWN_CHARACTERS: Final = 100


def check_follow_up(body: Mapping[str, Any], pool: Iterable[Worker]) -> None:
    """Check that a request to /v1/responses can be answered by any worker, because the router sends it to whichever it chooses.

    Args:
        body: Body of the request.
        pool: All workers; prefill workers do not count, because they store no response.

    Raises:
        RequestRefused: 400, the request refers to an earlier response that only another worker may have stored, or asks for
            a response that is generated in the background and can only be fetched later.
    """
    if body.get("background") is True:
        raise RequestRefused(
            400,
            "background: true: the answer could only be fetched by its id, which this router does not relay; stream it instead",
            code="responses_not_kept",
        )
    if body.get("previous_response_id") is None:
        return
    workers = sum(each.spec.role is not Role.PREFILL for each in pool)
    if workers > 1:
        raise RequestRefused(
            400,
            f"previous_response_id: a response is kept by the worker that made it, and this graph has {workers} that may be"
            " it; send the whole conversation as input",
            code="responses_not_kept",
        )


def not_relayed(path: str) -> RequestRefused:
    """Return the rejection (404) of a request to fetch, cancel or delete an earlier response, which the router does not relay.

    ``path`` is the path of the request, below ``/v1/responses``; the message names the part that identifies the response.
    """
    shown = path.removeprefix(RESPONSES)[:_SHOWN_CHARACTERS]
    return RequestRefused(
        404,
        f"path: responses are not kept here, so that {shown!r} cannot be fetched, cancelled or deleted; keep the answer of"
        " POST /v1/responses, and close its connection to cancel it",
        code="responses_not_kept",
    )
