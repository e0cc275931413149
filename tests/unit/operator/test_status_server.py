import pytest

from penstock.core.http.client import ConnectionPool
from penstock_operator.metrics import OperatorMetrics, StatusServer


@pytest.fixture
async def ask():
    """Return a coroutine function that asks a status server with a certain fault."""
    pool, servers = ConnectionPool(), []

    async def get(path, *, fault):
        server = StatusServer(OperatorMetrics(), unready=lambda: None, fault=lambda: fault)
        servers.append(server)
        await server.start("127.0.0.1", 0)
        return await pool.request("GET", f"http://127.0.0.1:{server.port}{path}")

    yield get
    await pool.close()
    for server in servers:
        await server.close(grace_s=0)


@pytest.mark.parametrize(
    ("path", "fault", "expected"),
    [
        ("/healthz", None, 200),
        ("/healthz", "lease l: leadership is over", 503),
        ("/metrics", "lease l: leadership is over", 200),
    ],
)
async def test_liveness_fails_when_only_a_restart_helps(ask, path, fault, expected):
    """An operator whose leadership ended and whose work did not is restarted by its probe, with the reason."""
    answer = await ask(path, fault=fault)
    assert answer.status == expected
    if expected == 503:
        assert fault.encode() in answer.body


def test_pools_have_series_by_their_statuses():
    """One that has no status yet has none; of a ClusterGpuPool each graph's namespace is told."""
    metrics = OperatorMetrics()
    row = {"name": "chat", "guaranteed": 2, "held": 3, "granted": 4, "wanted": 5, "shortfall": 0}
    of_cluster = {**row, "name": "team-b/chat"}
    pools = [
        {"metadata": {"name": "p"}, "status": {"gpus": {"total": 8}, "graphs": [of_cluster]}},
        {"metadata": {"namespace": "ns", "name": "p"}, "status": {"gpus": {"total": 6}, "graphs": [row]}},
        {"metadata": {"namespace": "ns", "name": "new"}},
    ]
    metrics.watch(depth=lambda: 0, graphs=tuple, pools=lambda: pools)
    page = metrics.page().decode()
    assert 'penstock_operator_pool_gpus{kind="GpuPool",namespace="ns",pool="p",state="total"} 6.0' in page
    assert (
        'penstock_operator_pool_graph_gpus{graph="chat",kind="GpuPool",namespace="ns",pool="p",state="wanted"} 5.0'
        in page
    )
    assert (
        'penstock_operator_pool_gpus{kind="ClusterGpuPool",namespace="",pool="p",state="total"} 8.0' in page
    )
    of_graph = 'graph="chat",kind="ClusterGpuPool",namespace="team-b",pool="p",state="wanted"'
    assert f"penstock_operator_pool_graph_gpus{{{of_graph}}} 5.0" in page
    assert 'pool="new"' not in page
