"""`penstock profile` of a real vLLM that it starts itself; its figures are a CPU's, so only their shape is asserted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.performance.profile import profile_from

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

VARIABLES = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
GRAPH = """
apiVersion: penstock.dev/v1alpha1
kind: GraphDeployment
metadata: {{name: tiny}}
spec:
  model: {{name: {model}, servedName: tiny, contextTokens: 2048}}
  runtime: vllm
  services:
    frontend: {{role: router}}
    worker:
      {{role: aggregated, args: [--enforce-eager, --dtype, bfloat16], startupTimeoutSeconds: 900}}
  engine: {{blockTokens: 128, kvBlocks: 33, maxRunningRequests: 4}}
  planner: {{enabled: false}}
"""


def test_a_real_vllm_is_profiled(deployment, tmp_path):
    """Started, measured and stopped; its own tokenizer's lengths, its cache, one size, and the four lines."""
    graph, folder = tmp_path / "tiny.yaml", tmp_path / "out"
    graph.write_text(GRAPH.format(model=os.environ["PENSTOCK_VLLM_MODEL"]))
    path = os.pathsep.join([str(Path(os.environ["PENSTOCK_VLLM"]).parent), os.environ["PATH"]])
    options = (
        f"--gpus 1 --isl 500 --osl 50 --ttft-slo 1m --itl-slo 10s --max-context 1024 --output-dir {folder}"
    )
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli", "profile", "--config", graph, *options.split()],
        env={**os.environ, **VARIABLES, "PATH": path},
        capture_output=True,
        text=True,
        timeout=1700,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Suggested ") == 4
    plain = json.loads((folder / "profile.json").read_text())
    profile, (engine,) = profile_from(plain), plain["sweep"]["engines"]
    assert engine["kv_tokens"] == 33 * 128
    assert profile.prefill.prompt_tokens[0] == pytest.approx(128, rel=0.1)
    assert {point["concurrency"] for point in engine["decode"]} >= {1.0, 2.0}
    assert not (folder / "worker.json").exists()
