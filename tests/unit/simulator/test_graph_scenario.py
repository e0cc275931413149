"""What a simulation takes from a manifest: the live router's settings and the live worker's engine."""

import pytest
from click.testing import CliRunner

from penstock.api.manifests import load_graph
from penstock.cli.simulate import simulate
from penstock.simulator.scenario import graph_pools

MANIFEST = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {name: g}
spec:
  model: {name: m, contextTokens: 131072}
  runtime: simulated
  services:
    frontend: {role: router}
    prefill: {role: prefill, replicas: 2, gpusPerReplica: 2, profile: h100-llama-8b-bf16-tp1}
    decode: {role: decode, replicas: 3}
  engine: {profile: a100-llama-8b-bf16-tp1, kvBlocks: 9000, maxBatchTokens: 4096}
  lease: {durationSeconds: 12}
  router:
    policy: dualmap
    ttftSloSeconds: 3
    dualmap: {rebalance: false, hotWindow: 50}
    prefillQueue: {order: hit-first, workerTokens: 20000, maxRequests: 7, maxWaitSeconds: 9}
  planner: {maxGpuBudget: 8}
"""


@pytest.fixture
def manifest(tmp_path):
    """A graph whose every setting that a simulation takes differs from its default."""
    path = tmp_path / "graph.yaml"
    path.write_text(MANIFEST)
    return path


def test_pools_are_the_engines_that_the_live_workers_run(manifest):
    """Profiles by service, the cache in tokens, blocks of 16, batch size, lease and GPUs."""
    prefill, decode = sorted(graph_pools(load_graph(manifest)), key=lambda pool: pool.replicas)
    assert (prefill.model.profile, prefill.gpus) == ("h100-llama-8b-bf16-tp1", 2)
    assert (decode.model.profile, decode.replicas) == ("a100-llama-8b-bf16-tp1", 3)
    assert decode.model.kv_tokens == 9000 * 16
    assert (decode.model.block_size, decode.model.max_num_batched_tokens) == (16, 4096)
    assert decode.model.lease.duration_s == 12


def test_the_command_takes_what_is_not_given_from_the_manifest(manifest):
    """Without options of its own, `simulate --manifest` runs the graph as it would be served."""
    common = [
        "--manifest",
        str(manifest),
        "--policy",
        "dualmap",
        "--trace",
        "poisson:rate=1,count=3",
        "--json",
    ]
    told = CliRunner().invoke(simulate, common, catch_exceptions=False).output
    for setting in ('"slo_s": 3', '"workerTokens": 20000', '"kv_tokens": 144000', '"rebalance": false'):
        assert setting in told
    asked = CliRunner().invoke(simulate, [*common, "--slo-s", "4", "--slot-tokens", "100"]).output
    assert '"slo_s": 4' in asked
    assert '"workerTokens": 100' in asked
