"""What a kubeconfig gives, and what is said where it gives nothing that lets in."""

import asyncio
import stat

import pytest

from penstock.core.errors import ClusterError, ConfigError
from penstock.kube import transport as transport_module
from penstock.kube.client import KubeClient
from penstock.kube.transport import read_credentials


@pytest.fixture
def plugin(tmp_path):
    """Return a function that writes a credential plugin and returns the kubeconfig's user of it."""

    def make(script):
        path = tmp_path / "plugin"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
        return {"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": str(path)}}

    return make


@pytest.fixture
def copies(tmp_path, monkeypatch):
    """The folder of temporary files."""
    folder = tmp_path / "copies"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def answer(status):
    """Return a plugin's script that answers an ExecCredential."""
    kind = '"apiVersion":"client.authentication.k8s.io/v1","kind":"ExecCredential"'
    return f"echo '{{{kind},\"status\":{status}}}'"


async def load(path, context=None):
    """Read a kubeconfig."""
    return await read_credentials(kubeconfig=path, context=context)


async def test_an_expired_token_of_a_plugin_is_asked_for_again(api, write_kubeconfig, plugin, tmp_path):
    """401: the plugin runs once more, and the call is repeated with what it gives now."""
    (tmp_path / "n").write_text("1")
    count = f"n=$(cat {tmp_path}/n); echo $((n+1)) > {tmp_path}/n; "
    counting = count + answer("""{"token":"t'$n'"}""")
    path = write_kubeconfig(f"http://127.0.0.1:{api.server.port}", user=plugin(counting))
    client = await KubeClient.connect(kubeconfig=path)
    api.script = [(401, api.status(401)), (200, {})]
    await client.raw_get("/version")
    assert [each.headers["authorization"] for each in api.asked] == ["Bearer t1", "Bearer t2"]
    await client.close()


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'log in first' >&2; exit 3", "process returned 3.*log in first"),
        (answer("{}"), "missing token or clientCertificateData"),
        (answer('{"clientCertificateData":"x","clientKeyData":"y"}'), "certificate or key not usable"),
    ],
)
async def test_a_plugin_that_fails_is_quoted(write_kubeconfig, plugin, script, words, copies):
    """Its own words; nothing is sent without credentials, and no key stays in a file."""
    path = write_kubeconfig("https://127.0.0.1:1", user=plugin(script))
    with pytest.raises(ConfigError, match=f"(?s){words}"):
        await KubeClient.connect(kubeconfig=path)
    assert list(copies.iterdir()) == []


async def test_a_plugin_that_fails_later_fails_the_call(api, write_kubeconfig, plugin, tmp_path):
    """The session at the cloud ended meanwhile: the call says so, not just 401."""
    user = plugin(answer('{"token":"old"}'))
    client = await KubeClient.connect(
        kubeconfig=write_kubeconfig(f"http://127.0.0.1:{api.server.port}", user=user)
    )
    plugin("echo 'session is over' >&2; exit 1")
    api.script = [(401, api.status(401))]
    with pytest.raises((ConfigError, ClusterError), match="session is over"):
        await client.raw_get("/version")
    await client.close()


async def test_a_plugin_that_hangs_is_given_up(write_kubeconfig, plugin, monkeypatch):
    """It may wait for a person."""

    async def run(_self, _previous=None):
        await asyncio.Event().wait()

    monkeypatch.setattr("kubernetes.aio.config.kube_config.ExecProvider.run", run)
    monkeypatch.setattr(transport_module, "PLUGIN_TIMEOUT_S", 0.01)
    with pytest.raises(ConfigError, match=r"took more than 0\.01 s"):
        await load(write_kubeconfig(user=plugin("exit 0")))


async def test_an_unreadable_certificate_is_named(write_kubeconfig, tmp_path):
    """A certificate authority that is not a certificate, one that is not there, and a key that does not fit."""
    (tmp_path / "ca").write_text("no certificate")
    for file, words in (("ca", "certificate or key not usable"), ("absent", "File does not exist")):
        cluster = {"server": "https://127.0.0.1:1", "certificate-authority": file}
        path = write_kubeconfig(clusters=[{"name": "c", "cluster": cluster}])
        with pytest.raises(ConfigError, match=words):
            await KubeClient.connect(kubeconfig=path)


async def test_a_cluster_without_an_address_and_an_unknown_proxy_are_refused_at_once(write_kubeconfig):
    """The package would speak to localhost, or fail at the first call."""
    socks = {"server": "https://127.0.0.1:1", "proxy-url": "socks5://127.0.0.1:2"}
    with pytest.raises(ConfigError, match=r"proxy-url 'socks5.*expected http://HOST:PORT"):
        await load(write_kubeconfig(clusters=[{"name": "c", "cluster": socks}]))
    with pytest.raises(ConfigError, match="server: missing"):
        await load(write_kubeconfig(clusters=[{"name": "c", "cluster": {"insecure-skip-tls-verify": True}}]))
