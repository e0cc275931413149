import inspect
import ssl

import httpx
import kr8s
import orjson
import pytest

from penstock_core.errors import (
    ClusterError,
    ConfigError,
    ConflictError,
    ExpiredError,
    ForbiddenError,
    InvalidObjectError,
    NotFoundError,
    PenstockError,
    UnavailableError,
)
from penstock_kube.failures import cluster_error, event_error, penstock_errors, status_error

REQUEST = httpx.Request("GET", "https://10.0.0.1/api")


def foreign_classes():
    """Every exception class that httpx and kr8s export."""
    found = set()
    for library in (httpx, kr8s):
        for _, each in inspect.getmembers(library, inspect.isclass):
            if issubclass(each, Exception):
                found.add(each)
    return sorted(found, key=lambda each: f"{each.__module__}.{each.__name__}")


def instance(cls):
    """Make one of a class, whose constructors differ."""
    if issubclass(cls, httpx.HTTPStatusError):
        return cls("no", request=REQUEST, response=httpx.Response(409, request=REQUEST))
    for arguments in (("no",), ()):
        try:
            return cls(*arguments)
        except TypeError:
            continue
    raise AssertionError(f"no way to make a {cls}")


@pytest.mark.parametrize("cls", foreign_classes(), ids=lambda cls: cls.__name__)
def test_every_exception_of_the_libraries_is_mapped(cls):
    """Nothing but Penstock's own errors leaves the adapter, with the foreign one as its cause."""
    foreign = instance(cls)
    with pytest.raises(PenstockError, match="GET /api") as caught, penstock_errors("GET /api"):
        raise foreign
    assert caught.value.__cause__ is foreign


def test_the_libraries_exceptions_are_found():
    """The enumeration above is not empty by accident."""
    names = {each.__name__ for each in foreign_classes()}
    assert {"ConnectError", "ReadTimeout", "RemoteProtocolError", "ServerError", "APITimeoutError"} <= names


@pytest.mark.parametrize(
    "foreign",
    [
        httpx.ConnectError("refused"),
        httpx.ReadTimeout("late"),
        httpx.RemoteProtocolError("half an answer"),
        kr8s.APITimeoutError("late"),
        kr8s.ConnectionClosedError("gone"),
        ssl.SSLError("handshake"),
        ConnectionResetError("reset"),
    ],
)
def test_what_may_pass_is_unavailable(foreign):
    """No answer, for whatever reason, may be asked for again."""
    assert isinstance(cluster_error(foreign, "GET /api"), UnavailableError)


@pytest.mark.parametrize("foreign", [httpx.InvalidURL("bad"), httpx.UnsupportedProtocol("ftp")])
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
    body = orjson.dumps({"kind": "Status", "message": 'pods "a" is wrong'})
    found = status_error(status, body, {}, "PATCH /api")
    assert type(found) is error
    assert str(found) == f'PATCH /api: {status}: pods "a" is wrong'
    assert (
        type(
            cluster_error(httpx.HTTPStatusError("no", request=REQUEST, response=httpx.Response(status)), "x")
        )
        is error
    )


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({"retry-after": "7"}, 7.0), ({}, None), ({"retry-after": "Wed, 21 Oct 2026 07:28:00 GMT"}, None)],
)
def test_the_servers_wish_to_be_left_alone_is_kept(headers, seconds):
    """Retry-After in seconds; a date is not read."""
    assert status_error(429, b"", headers, "GET /api").retry_after_s == seconds


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no message"),
        (b"<html>Bad Gateway", "<html>Bad Gateway"),
        (b"[]", r"\[\]"),
        (b'{"message": 1}', "message"),
    ],
)
def test_a_body_that_is_no_status_is_shown(body, words):
    """A proxy's page instead of a Status still helps."""
    with pytest.raises(UnavailableError, match=words):
        raise status_error(502, body, {}, "GET /api")


def test_an_error_event_is_read_by_its_code():
    """A watch's ERROR event carries a Status; one without a code counts as a failure of the server."""
    assert isinstance(event_error({"code": 410, "message": "too old"}, "watch"), ExpiredError)
    assert isinstance(event_error({"message": "odd"}, "watch"), UnavailableError)


def test_a_server_error_of_kr8s_without_a_response():
    """It cannot be told apart further."""
    assert type(cluster_error(kr8s.ServerError("no"), "GET /api")) is ClusterError
