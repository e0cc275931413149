"""The client against a real API server: what it reads and writes, how it fails, and that it comes back."""

import asyncio
import random

import pytest
import yaml

from penstock.core.errors import (
    ForbiddenError,
    InvalidObjectError,
)
from penstock.kube import client as client_module
from penstock.kube import transport as transport_module
from penstock.kube.client import KubeClient
from penstock.kube.kinds import CONFIG_MAP, POD, SERVICE_ACCOUNT

pytestmark = pytest.mark.cluster

ME = "penstock-test"


def config_map(namespace, name="settings", **data):
    """Return a ConfigMap."""
    metadata = {"name": name, "namespace": namespace, "labels": {"app": "test"}}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}


async def connect(kubeconfig):
    """Return a client of a kubeconfig."""
    return await KubeClient.connect(kubeconfig=kubeconfig, rng=random.Random(1))


async def test_applied_fields_are_read_back_and_those_left_out_go(client, namespace):
    """Apply owns exactly the fields it names, whoever had them: one that is left out the next time disappears."""
    await client.apply(config_map(namespace, a="0"), field_manager="somebody")
    await client.apply(config_map(namespace, a="1", b="2"), field_manager=ME)
    await client.apply(config_map(namespace, a="1"), field_manager=ME)
    found = await client.get(CONFIG_MAP, "settings", namespace=namespace)
    assert found["data"] == {"a": "1"}
    assert ME in {each["manager"] for each in found["metadata"]["managedFields"]}


async def test_an_invalid_object_is_refused_in_the_servers_words(client, namespace):
    """422 and 400 carry the server's message with the field's path."""
    with pytest.raises(InvalidObjectError, match=r"metadata\.name: Invalid value"):
        await client.apply(config_map(namespace, name="Not_A_Name"), field_manager=ME)
    with pytest.raises(InvalidObjectError, match=r"metadata\.name: needed"):
        await client.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {}}, field_manager=ME)
    with pytest.raises(InvalidObjectError, match="not a kind"):
        await client.create({"apiVersion": "v1", "kind": "Teapot"}, field_manager=ME)


async def test_a_list_is_complete_over_many_pages(client, namespace, monkeypatch):
    """23 objects come in pages of 5, each with its kind; labels select."""
    monkeypatch.setattr(client_module, "PAGE", 5)
    for number in range(23):
        await client.create(config_map(namespace, f"item-{number}"), field_manager=ME)
    listing = await client.list(CONFIG_MAP, namespace=namespace, labels={"app": "test"})
    assert sorted(each["metadata"]["name"] for each in listing.items) == sorted(
        f"item-{n}" for n in range(23)
    )
    assert {(each["apiVersion"], each["kind"]) for each in listing.items} == {("v1", "ConfigMap")}
    assert int(listing.resource_version) > 0
    assert (await client.list(CONFIG_MAP, namespace=namespace, labels={"app": "other"})).items == []
    everywhere = await client.list(CONFIG_MAP, namespace=None, labels={"app": "test"})
    assert len(everywhere.items) >= 23


async def test_a_service_account_without_rights_is_told_which_it_lacks(api_server, client, namespace):
    """403 names the user, the verb and the resource, at once and without reading credentials repeatedly."""
    kubeconfig = api_server.service_account_kubeconfig(namespace, "default")
    mark = api_server.audit_mark()
    weak = await connect(kubeconfig)
    try:
        assert weak.namespace == namespace
        with pytest.raises(ForbiddenError, match=r"cannot list resource .pods."):
            await weak.list(POD, namespace=namespace)
    finally:
        await weak.close()
    user = f"system:serviceaccount:{namespace}:default"
    assert len(api_server.audit_events(after=mark, user=user)) == 1


async def test_a_client_certificate_lets_in_and_leaves_no_key_behind(api_server, tmp_path, monkeypatch):
    """Inline certificates work, and the client library's copies of the keys are gone."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    certified = await connect(api_server.certificate_kubeconfig())
    try:
        mark = api_server.audit_mark()
        await certified.list(SERVICE_ACCOUNT, namespace="default")
        assert api_server.audit_events(after=mark, user="certified-admin")
        assert list(tmp_path.iterdir()) == []
    finally:
        await certified.close()


async def test_a_pod_uses_its_service_account(api_server, namespace, tmp_path, monkeypatch):
    """Without a kubeconfig the mounted token, certificate and namespace count; a rotated token is picked up."""
    good = api_server.kubectl("create", "token", "default", "--namespace", namespace).strip()
    (tmp_path / "token").write_text("expired")
    (tmp_path / "namespace").write_text(namespace)
    (tmp_path / "ca.crt").write_bytes((api_server.folder / "ca.crt").read_bytes())
    monkeypatch.setattr(transport_module, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "absent"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", str(api_server.port))
    client = await KubeClient.connect(rng=random.Random(1))
    try:
        assert (client.namespace, client.server) == (namespace, api_server.url)
        (tmp_path / "token").write_text(good)
        assert (await client.raw_get("/version"))["major"] == "1"
    finally:
        await client.close()


async def test_a_new_certificate_authority_is_read_again(api_server, own_api_server, tmp_path):
    """The file held another cluster's authority and holds the right one now: the next call succeeds."""
    kubeconfig = yaml.safe_load(api_server.kubeconfig.read_text())
    authority = tmp_path / "ca.crt"
    authority.write_bytes((own_api_server.folder / "ca.crt").read_bytes())
    cluster = kubeconfig["clusters"][0]["cluster"]
    cluster.pop("certificate-authority-data", None)
    cluster["certificate-authority"] = "ca.crt"
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump(kubeconfig))
    client = await connect(tmp_path / "kubeconfig")
    try:
        authority.write_bytes((api_server.folder / "ca.crt").read_bytes())
        assert (await client.raw_get("/version"))["major"] == "1"
    finally:
        await client.close()


async def test_many_calls_at_once_renew_the_credentials_once(api_server, namespace, monkeypatch):
    """Twenty refused calls lead to one reading of the credentials, then all succeed."""
    good = api_server.kubectl("create", "token", "default", "--namespace", namespace).strip()
    kubeconfig = api_server.kubeconfig_for("herd", "expired", namespace=namespace, file=True)
    client = await connect(kubeconfig)
    kubeconfig.with_suffix(".token").write_text(good)
    try:
        answers = await asyncio.gather(*(client.raw_get("/version") for _ in range(20)))
        assert all(each["major"] == "1" for each in answers)
        assert client.transport.version == 2
    finally:
        await client.close()
