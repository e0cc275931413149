"""What has expired is named with its key and its file, where the API server only says that it refuses."""

import asyncio
import base64
import datetime as dt
import ssl

import orjson
import pytest
from certificates import write_certificates
from cryptography import x509
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.errors import ForbiddenError, UnavailableError
from penstock.kube import transport
from penstock.kube.client import KubeClient
from penstock.kube.expiry import Expiry, certificate_expiry, token_expiry

PAST = dt.datetime(2024, 2, 3, 4, 5, 6, tzinfo=dt.UTC)


def token(**claims):
    """Return a JSON Web Token with some claims."""
    parts = (base64.urlsafe_b64encode(orjson.dumps(each)).rstrip(b"=") for each in ({"alg": "none"}, claims))
    return b".".join((*parts, b"signature")).decode()


def utc(at):
    """Return a time as messages have it."""
    return f"{at:%Y-%m-%dT%H:%M:%SZ}"


@pytest.fixture
def expired(tmp_path):
    """The folder of certificates, whose client's has expired, and when."""
    write_certificates(tmp_path, client_valid=-dt.timedelta(hours=2))
    certificate = x509.load_pem_x509_certificate((tmp_path / "client.crt").read_bytes())
    return tmp_path, certificate.not_valid_after_utc


@pytest.mark.parametrize("days", [-400, -1, 1, 400, 40_000])
def test_a_certificate_says_until_when_it_is_valid(tmp_path, days):
    """In both of the forms that its times may have, and with what may stand before it in its file."""
    write_certificates(tmp_path, client_valid=dt.timedelta(days=days))
    text = (tmp_path / "client.crt").read_text()
    at = x509.load_pem_x509_certificate(text.encode()).not_valid_after_utc
    assert certificate_expiry(text) == certificate_expiry(f"subject: x\n{text}{text}") == at


@given(st.text() | st.binary().map(ssl.DER_cert_to_PEM_cert))
def test_what_is_no_certificate_never_expires(text):
    """Nor does it raise."""
    assert certificate_expiry(text) is None


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (token(exp=PAST.timestamp()), PAST),
        ("bearer " + token(exp=PAST.timestamp()) + "\n", PAST),
        (token(), None),
        (token(exp="soon"), None),
        (token(exp=1e40), None),
        ("abc", None),
        ("a.b.c", None),
        ("a.ö.c", None),
        (f"a.{base64.urlsafe_b64encode(b'[]').decode()}.c", None),
    ],
)
def test_a_token_says_when_it_expires_or_nothing(text, expected):
    """Of a service account it does; of a cloud's it may be anything."""
    assert token_expiry(text) == expected


def test_what_expires_now_has_expired():
    """And what says nothing has not."""
    assert Expiry("it", PAST).problem(PAST) == f"it expired at {utc(PAST)}"
    assert Expiry("it", PAST).problem(PAST - dt.timedelta(seconds=1)) is None
    assert Expiry("it", None).problem(PAST) is None


def user_of(kind, folder):
    """Return a kubeconfig's user of a kind, and what it is called."""
    old = token(exp=PAST.timestamp())
    (folder / "tok").write_text(old + "\n")
    inline = base64.b64encode((folder / "client.crt").read_bytes()).decode()
    key = base64.b64encode((folder / "client.key").read_bytes()).decode()
    return {
        "token": ({"token": old}, "token of user u in "),
        "token file": ({"tokenFile": str(folder / "tok")}, f"tokenFile {folder / 'tok'} of user u in "),
        "files": (
            {"client-certificate": "client.crt", "client-key": "client.key"},
            "client-certificate client.crt of user u in ",
        ),
        "inline": (
            {"client-certificate-data": inline, "client-key-data": key},
            "client-certificate-data of user u in ",
        ),
    }[kind]


@pytest.fixture
async def secure(expired, api):
    """The fake API server over TLS, and a function that starts another server with options of its TLS."""
    folder, _ = expired

    def context(**options):
        made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=folder / "ca.crt")
        made.load_cert_chain(folder / "server.crt", folder / "server.key")
        for name, value in options.items():
            setattr(made, name, value)
        return made

    api = type(api)()
    await api.server.start("127.0.0.1", 0, context())
    yield api, context
    await api.server.close(grace_s=0)


def cluster_at(port):
    """Return the clusters of a kubeconfig."""
    cluster = {"server": f"https://127.0.0.1:{port}", "certificate-authority": "ca.crt"}
    return [{"name": "c", "cluster": cluster}]


@pytest.mark.parametrize("kind", ["token", "token file", "files", "inline"])
async def test_a_refusal_names_what_has_expired_and_where_it_is(expired, secure, write_kubeconfig, kind):
    """The server says 401 and no more, before and after the credentials were read again."""
    (folder, at), (api, _) = expired, secure
    user, name = user_of(kind, folder)
    path = write_kubeconfig(user=user, clusters=cluster_at(api.server.port))
    client = await KubeClient.connect(kubeconfig=path)
    api.script = [(401, api.status(401, "Unauthorized"))] * 2
    with pytest.raises(ForbiddenError) as refused:
        await client.raw_get("/version")
    await client.close()
    when = utc(PAST if "token" in kind else at)
    words = f"Unauthorized; {name}{path} expired at {when}: renew it, or log in again"
    assert str(refused.value).endswith(words)
    assert len(api.asked) == 2


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
async def test_a_server_that_breaks_off_for_an_expired_certificate_says_so_too(
    expired, secure, write_kubeconfig, no_pause, version
):
    """A proxy before the API server refuses it while they shake hands, or at the first read."""
    (folder, at), (_, context) = expired, secure
    tls = context(verify_mode=ssl.CERT_REQUIRED, minimum_version=version, maximum_version=version)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=tls)
    user, name = user_of("files", folder)
    path = write_kubeconfig(user=user, clusters=cluster_at(server.sockets[0].getsockname()[1]))
    client = await KubeClient.connect(kubeconfig=path)
    with pytest.raises(UnavailableError, match="does not answer") as refused:
        await client.raw_get("/version")
    assert client.transport.version > 1
    await client.close()
    server.close()
    await server.wait_closed()
    assert f"{name}{path} expired at {utc(at)}" in str(refused.value)


async def test_a_pod_s_own_token_is_named_by_its_file(api, tmp_path, monkeypatch):
    """Kubelet gives no new one where the account is gone."""
    mounted = tmp_path / "serviceaccount"
    mounted.mkdir()
    write_certificates(mounted)
    (mounted / "token").write_text(token(exp=PAST.timestamp()))
    monkeypatch.setattr(transport, "SERVICE_ACCOUNT", mounted)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "1")
    found = await transport.read_credentials(kubeconfig=None, context=None)
    problem = ForbiddenError("refused")
    assert found.note_expired(problem)
    assert problem.__notes__ == [f"the token in {mounted / 'token'} expired at {utc(PAST)}"]
