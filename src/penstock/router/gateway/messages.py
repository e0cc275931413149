"""Encodes and decodes the messages of the endpoint-picker protocol. Pure.

Envoy's external processing (ext_proc v3) with the conventions of the Gateway API Inference Extension:
https://github.com/kubernetes-sigs/gateway-api-inference-extension/tree/main/docs/proposals/004-endpoint-picker-protocol
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from envoy.config.core.v3.base_pb2 import HeaderMap, HeaderValue, HeaderValueOption, Metadata
from envoy.extensions.filters.http.ext_proc.v3.processing_mode_pb2 import ProcessingMode
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyMutation,
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    ImmediateResponse,
    ProcessingRequest,
    ProcessingResponse,
    StreamedBodyResponse,
    TrailersResponse,
)
from envoy.type.v3.http_status_pb2 import HttpStatus
from google.protobuf.struct_pb2 import Struct

from penstock.core.http.messages import Headers

DESTINATION: Final = "x-gateway-destination-endpoint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
SERVED: Final = "x-gateway-destination-endpoint-served"
_LB: Final = "envoy.lb"
_SUBSET_HINT: Final = "envoy.lb.subset_hint"
_CHUNK_BYTES: Final = 62_000
"""Maximum number of body bytes per message: Envoy's streams to a processor have windows of 64 KiB by default."""
_CREDENTIALS: Final = (b"authorization", b"x-api-key", b"proxy-authorization")
"""Headers with a client's credentials, which are for the router and not for workers."""
_PER_CONNECTION: Final = frozenset({b"connection", b"keep-alive", b"content-length", b"transfer-encoding"})


def endpoint_of(url: str) -> str:
    """Return the ``host:port`` in the base URL ``url`` of a worker: the name of the worker in the protocol with the gateway."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    return f"[{host}]:{parts.port or 80}" if ":" in host else f"{host}:{parts.port or 80}"


def read_headers(headers: HeaderMap) -> dict[bytes, bytes]:
    """Return the values of ``headers`` by lower-case name, including HTTP/2's pseudo headers (``:path`` and so on).

    Values of repeated headers are joined by commas.
    """
    found: dict[bytes, bytes] = {}
    for each in headers.headers:
        name, value = each.key.lower().encode(), each.raw_value or each.value.encode()
        found[name] = found[name] + b", " + value if name in found else value
    return found


def read_subset(metadata: Metadata) -> frozenset[str] | None:
    """Return the endpoints (``host:port``) to which a request may be sent; None if the gateway does not restrict them.

    ``metadata`` is the metadata of Envoy's message, in which the gateway names them (the subset).
    """
    hint = metadata.filter_metadata.get(_SUBSET_HINT)
    if hint is None or SUBSET not in hint.fields:
        return None
    value = hint.fields[SUBSET]
    if value.WhichOneof("kind") == "list_value":
        named = [each.string_value for each in value.list_value.values]
    else:
        named = value.string_value.split(",")
    return frozenset(each.strip() for each in named if each.strip())


def read_served(metadata: Metadata) -> str | None:
    """Return the endpoint (``host:port``) to which the gateway has sent the request; None if the gateway does not report it.

    ``metadata`` is the metadata of Envoy's message with the response.
    """
    reported = metadata.filter_metadata.get(_LB)
    served = "" if reported is None or SERVED not in reported.fields else reported.fields[SERVED].string_value
    return served or None


def unsupported_mode(request: ProcessingRequest) -> str | None:
    """Return a message about a processing mode of the gateway's filter that is not supported, with the remedy; None if all modes are."""
    modes = request.protocol_config
    wanted = ProcessingMode.FULL_DUPLEX_STREAMED
    for key, mode in (
        ("request_body_mode", modes.request_body_mode),
        ("response_body_mode", modes.response_body_mode),
    ):
        if mode != wanted:
            name = ProcessingMode.BodySendMode.Name(mode)
            return f"processing_mode.{key}: {name} in the gateway's ext_proc filter; set FULL_DUPLEX_STREAMED"
    return None


def picked(
    endpoint: str, headers: Headers, body: bytes, *, has_trailers: bool = False
) -> Iterator[ProcessingResponse]:
    """Yield the messages to Envoy that let it send a client's request to a worker: headers first, then the body in parts.

    Args:
        endpoint: Endpoint of the worker, ``host:port``.
        headers: Headers to set in addition to the endpoint's. Credentials that are not among them are removed.
        body: Body for the worker.
        has_trailers: Whether the client's request ends with trailers instead of its body.
    """
    length = (b"content-length", b"%d" % len(body))
    mutation = _mutation((*headers, (DESTINATION.encode(), endpoint.encode()), length))
    mutation.remove_headers.append("accept-encoding")  # the answer is read here
    mutation.remove_headers.append("content-encoding")  # the body is sent as it was read
    kept = {name for name, _ in headers}
    mutation.remove_headers.extend(name.decode() for name in _CREDENTIALS if name not in kept)
    common = CommonResponse(header_mutation=mutation, clear_route_cache=True)
    metadata = Struct()
    metadata[_LB] = {DESTINATION: endpoint}
    yield ProcessingResponse(request_headers=HeadersResponse(response=common), dynamic_metadata=metadata)
    for start in range(0, len(body), _CHUNK_BYTES):
        end = start + _CHUNK_BYTES
        yield ProcessingResponse(
            request_body=_streamed(body[start:end], is_last=end >= len(body) and not has_trailers)
        )
    if has_trailers:
        yield ProcessingResponse(request_trailers=TrailersResponse())


def head(headers: Headers) -> ProcessingResponse:
    """Return the message to Envoy that relays the status and the headers of a worker's response, with ``headers`` added.

    Content-Length is removed, because the router may change the body.
    """
    mutation = _mutation(headers)
    mutation.remove_headers.append("content-length")
    return ProcessingResponse(
        response_headers=HeadersResponse(response=CommonResponse(header_mutation=mutation))
    )


def chunk(body: bytes, *, is_last: bool) -> ProcessingResponse:
    """Return the message to Envoy that sends ``body``, the next part of a response's body, to the client.

    ``is_last`` says that the response ends with it.
    """
    return ProcessingResponse(response_body=_streamed(body, is_last=is_last))


def trailers() -> ProcessingResponse:
    """Return the message to Envoy that relays the trailers of a worker's response (headers after the body), which end it."""
    return ProcessingResponse(response_trailers=TrailersResponse())


def immediate(status: int, body: bytes, content_type: str, headers: Headers) -> ProcessingResponse:
    """Return the message to Envoy that sends a complete response of the router to the client.

    It takes the place of the request to a worker, or of the worker's response. ``headers`` are added to those of the response.
    """
    kept = [each for each in headers if each[0] not in _PER_CONNECTION]
    if body:
        kept.append((b"content-type", content_type.encode("latin-1")))
    answer = ImmediateResponse(
        status=HttpStatus(code=status), headers=_mutation(kept), body=body, details="penstock"
    )
    return ProcessingResponse(immediate_response=answer)


def _streamed(body: bytes, *, is_last: bool) -> BodyResponse:
    streamed = StreamedBodyResponse(body=body, end_of_stream=is_last)
    return BodyResponse(response=CommonResponse(body_mutation=BodyMutation(streamed_response=streamed)))


def _mutation(headers: Headers) -> HeaderMutation:
    return HeaderMutation(
        set_headers=[
            HeaderValueOption(
                header=HeaderValue(key=name.decode("latin-1"), raw_value=value),
                append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
            )
            for name, value in headers
        ]
    )
