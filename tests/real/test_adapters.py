"""LoRA adapters of a manifest on real vLLM, through prefill and decode: each name answers in its own words."""

import json

import httpx
import numpy as np
import pytest
from endpoint import SENTENCE

from penstock.local.random_model import RandomModel, safetensors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]

RANK = 8
PROMPT = SENTENCE * 4


def write_adapter(folder, seed):
    """Write an adapter of random weights, in the files that PEFT writes."""
    folder.mkdir()
    model, random = RandomModel(), np.random.default_rng(seed)
    size = model.hidden_size
    weights = {}
    for layer in range(model.layers):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        weights[f"{name}.lora_A.weight"] = random.normal(size=(RANK, size)).astype(np.float32)
        weights[f"{name}.lora_B.weight"] = random.normal(size=(size, RANK)).astype(np.float32)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["o_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "adapter_model.safetensors").write_bytes(safetensors(weights))
    return str(folder)


@pytest.fixture
def router(deployment, tmp_path):
    """The router of a prefill and a decode worker with two adapters; stopped in the end, as idle workers keep cores busy."""
    path = deployment.manifest("adapters", {}, "prefill", "decode")
    graph = json.loads(path.read_bytes())
    graph["spec"]["model"]["adapters"] = [
        {"name": name, "path": write_adapter(tmp_path / name, seed)}
        for seed, name in enumerate(("sql", "law"))
    ]
    graph["spec"]["model"]["aliases"] = ["also"]
    path.write_text(json.dumps(graph))
    workers = deployment.workers(path)
    router = deployment.router("router-adapters", "--graph", str(path), **workers)
    yield router
    for process in (router, *workers.values()):
        process.stop()


def test_each_adapter_answers_in_its_own_words_through_prefill_and_decode(router):
    """The model and two adapters differ, each says the same twice, and a prefix is reused under its own name alone."""

    def answer(name):
        body = {"model": name, "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
        response = httpx.post(f"{router.url}/v1/completions", json=body, timeout=120)
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    names = ("tiny", "sql", "law")
    first = {name: answer(name) for name in names}
    assert len(set(first.values())) == 3
    assert {name: answer(name) for name in names} == first
    assert answer("also") == first["tiny"]
    unknown = httpx.post(f"{router.url}/v1/completions", json={"model": "nosql", "prompt": "a"}, timeout=30)
    assert unknown.status_code == 404
    listed = httpx.get(f"{router.url}/v1/models", timeout=30).json()["data"]
    assert [each["id"] for each in listed] == ["tiny", "also", "sql", "law"]
