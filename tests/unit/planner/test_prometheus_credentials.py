"""A Prometheus behind TLS: an own authority, a client's certificate, a token that rotates, and who gets none of them."""

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
import requests
from certificates import write_certificates

from penstock.core.errors import ConfigError
from penstock_planner.sources.prometheus import connect
from penstock_planner.sources.prometheus_credentials import credentials_for

ANSWER = {"status": "success", "data": {"resultType": "vector", "result": []}}


class Page(BaseHTTPRequestHandler):
    """Answers each query, and notes the credentials."""

    def do_GET(self):
        """One query."""
        self.server.tokens.append(self.headers.get("Authorization"))
        body = json.dumps(ANSWER).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def server(tmp_path):
    """A server that wants a client's certificate; its files are in the folder."""
    write_certificates(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    context.load_verify_locations(tmp_path / "ca.crt")
    context.verify_mode = ssl.CERT_REQUIRED
    httpd = HTTPServer(("127.0.0.1", 0), Page)
    httpd.tokens = []
    httpd.socket = context.wrap_socket(httpd.socket, server_side=True)
    thread = threading.Thread(target=httpd.serve_forever, daemon=True)
    thread.start()
    yield httpd
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def _file(folder, url, **files):
    path = folder / "credentials.yaml"
    path.write_text(json.dumps({url: {key: str(folder / name) for key, name in files.items()}}))
    return str(path)


def test_a_server_gets_certificate_and_token_and_is_proven_by_its_authority(server, tmp_path):
    """The token is read again at each request, as Kubernetes rotates it."""
    url = f"https://127.0.0.1:{server.server_port}"
    token = tmp_path / "token"
    files = {
        "tokenFile": "token",
        "caFile": "ca.crt",
        "certificateFile": "client.crt",
        "keyFile": "client.key",
    }
    client = connect(f"{url}/prefix", _file(tmp_path, url, **files))

    for secret in ("first", "second"):
        token.write_text(f"{secret}\n")
        assert client.custom_query("up") == []

    assert server.tokens == ["Bearer first", "Bearer second"]


def test_a_server_of_an_unknown_authority_gets_nothing(server, tmp_path):
    """Without the authority the connection is refused before anything is sent."""
    url = f"https://127.0.0.1:{server.server_port}"
    (tmp_path / "token").write_text("secret")

    with pytest.raises(requests.exceptions.SSLError):
        connect(url, _file(tmp_path, url, tokenFile="token")).custom_query("up")
    assert server.tokens == []


def test_another_server_gets_no_token(tmp_path):
    """A graph may name one that its owner runs."""
    file = _file(tmp_path, "https://prometheus:9090", tokenFile="token")

    assert credentials_for("https://prometheus:9090/api", file) is not None
    for url in (
        "https://evil:9090",
        "https://prometheus:9091",
        "http://prometheus:9090",
        "https://prometheus",
    ):
        assert credentials_for(url, file) is None
    assert credentials_for("https://prometheus:9090", None) is None


def test_the_usual_port_need_not_be_said(tmp_path):
    """It is the same server."""
    assert credentials_for("https://prometheus:443/x", _file(tmp_path, "https://prometheus", caFile="ca"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{'http://p:9090': {tokenFile: t}}", "would travel in clear text; use https"),
        ("{'http://p:9090': {certificateFile: t}}", "certificateFile and keyFile belong together"),
        ("{'http://p:9090': {token: t}}", "Extra inputs are not permitted"),
        ("[a]", "must map origins"),
        ("{", "credentials.yaml: while parsing"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(tmp_path, text, words):
    """In words that name the flag."""
    file = tmp_path / "credentials.yaml"
    file.write_text(text)

    with pytest.raises(ConfigError, match=words) as caught:
        credentials_for("http://p:9090", str(file))
    assert str(caught.value).startswith("--prometheus-credentials: ")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    """Rather than to ask without a token."""
    with pytest.raises(ConfigError, match="No such file"):
        credentials_for("http://p:9090", str(tmp_path / "none.yaml"))
