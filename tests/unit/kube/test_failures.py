import inspect
import ssl

import aiohttp
import orjson
import pytest
from aiohttp.client_reqrep import ConnectionKey
from aiohttp.http_exceptions import BadHttpMessage
from kubernetes.aio.client import ApiException
from kubernetes.aio.config import ConfigException
from yarl import URL

from penstock.core.errors import (
    ConfigError,
    ConflictError,
    ExpiredError,
    ForbiddenError,
    InvalidObjectError,
    NotFoundError,
    PenstockError,
    UnavailableError,
)
from penstock.kube.failures import cluster_error, penstock_errors

KEY = ConnectionKey("10.0.0.1", 443, True, True, None, None, None)
REQUEST = aiohttp.RequestInfo(URL("https://10.0.0.1/api"), "GET", {})


def foreign_classes():
    """Every exception class of aiohttp except for those of websockets and of bodies with several parts, and the official client's."""
    found = {aiohttp.http_exceptions.HttpProcessingError, ConfigException}
    for _, each in inspect.getmembers(aiohttp, inspect.isclass):
        if issubclass(each, aiohttp.ClientError):
            found.add(each)
    return sorted(found, key=lambda each: f"{each.__module__}.{each.__name__}")


def instance(cls):
    """Make one of a class, whose constructors differ."""
    broken = OSError(1, "no")
    tries = ((KEY, broken), (REQUEST, ()), (b"a", b"b", "host", 443), ("no",), ())
    for arguments in tries:
        try:
            found = cls(*arguments)
            str(found)
        except (TypeError, AttributeError):
            continue
        return found
    raise AssertionError(f"no way to make a {cls}")


def refused(status, *, body=b"", headers=None):
    """Return what becomes of an answer of the API server."""
    foreign = ApiException(status, body=body.decode())
    foreign.headers = headers
    return cluster_error(foreign, "GET /api")


@pytest.mark.parametrize("cls", foreign_classes(), ids=lambda cls: cls.__name__)
def test_every_exception_of_the_libraries_is_mapped(cls):
    """Nothing but Penstock's own errors leaves the adapter, with the foreign one as its cause."""
    foreign = instance(cls)
    with pytest.raises(PenstockError, match="GET /api") as caught, penstock_errors("GET /api"):
        raise foreign
    assert caught.value.__cause__ is foreign


@pytest.mark.parametrize(
    "foreign",
    [
        aiohttp.ClientConnectorError(KEY, OSError(111, "refused")),
        aiohttp.SocketTimeoutError("late"),
        aiohttp.ClientPayloadError("half an answer"),
        aiohttp.ClientHttpProxyError(REQUEST, (), status=502),
        BadHttpMessage("no answer at all"),
        ssl.SSLError("handshake"),
        ConnectionResetError("reset"),
    ],
)
def test_what_may_pass_is_unavailable(foreign):
    """No answer, for whatever reason, may be asked for again."""
    assert isinstance(cluster_error(foreign, "GET /api"), UnavailableError)


@pytest.mark.parametrize("foreign", [aiohttp.InvalidURL("bad"), aiohttp.NonHttpUrlClientError("ftp://a")])
def test_a_bad_address_is_the_configurations_fault(foreign):
    """It does not heal by waiting."""
    assert isinstance(cluster_error(foreign, "GET /api"), ConfigError)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, InvalidObjectError),
        (401, ForbiddenError),
        (403, ForbiddenError),
        (404, NotFoundError),
        (405, InvalidObjectError),
        (408, UnavailableError),
        (409, ConflictError),
        (410, ExpiredError),
        (415, InvalidObjectError),
        (422, InvalidObjectError),
        (429, UnavailableError),
        (500, UnavailableError),
        (503, UnavailableError),
        (504, UnavailableError),
    ],
)
def test_statuses(status, error):
    """Each status is one kind of failure; the server's message is kept."""
    found = refused(status, body=orjson.dumps({"kind": "Status", "message": 'pods "a" is wrong'}))
    assert type(found) is error
    remedy = "; the API server refuses the token or certificate, which was read again: log in, or restore the pod's token"
    assert str(found) == f'GET /api: {status}: pods "a" is wrong{remedy if status == 401 else ""}'


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({"retry-after": "7"}, 7.0), ({}, None), ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, None)],
)
def test_the_servers_wish_to_be_left_alone_is_kept(headers, seconds):
    """Retry-After in seconds; a date is not read."""
    assert refused(429, headers=headers).retry_after_s == seconds


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no message"),
        (b"<html>Bad Gateway", "<html>Bad Gateway"),
        (b"[]", r"\[\]"),
        (b'{"message": ""}', "message"),
    ],
)
def test_a_body_that_is_no_status_is_shown(body, words):
    """A proxy's page instead of a Status still helps."""
    with pytest.raises(UnavailableError, match=words):
        raise refused(502, body=body)
