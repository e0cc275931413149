"""TensorRT-LLM's servers: their command, and what prefill's answer gives decode."""

from __future__ import annotations

import subprocess

import orjson
import pytest
import yaml

from penstock.api import GraphSpec
from penstock.core.errors import InvalidSpecError
from penstock.runtimes import RuntimeContext, filled_argv, filled_env, process_specs, runtime_of
from penstock.runtimes.kv_transfer import KvSource

CONTEXT = RuntimeContext(python="/py", graph_file="/g.yaml", discovery="/state/llama.json", namespace="llama")
PROGRAM = """\
#!/bin/bash
test "$1 $2" = "serve --config" || exit 3
cat "$3"; shift 3; echo ARGS; printf '%s\\n' "$@"
"""
SOURCE = KvSource("10.0.0.1", None, 5)
PARAMS = {
    "request_type": "context_only",
    "ctx_request_id": 7,
    "first_gen_tokens": [5],
    "ctx_info_endpoint": "tcp://a",
}


def started(build, tmp_path, role, **changes):
    """The configuration and the arguments that the program of a role gets from its command."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "trtllm-serve").write_text(PROGRAM)
    (folder / "trtllm-serve").chmod(0o755)
    changes["engine"] = {"pythonEnvironment": str(tmp_path), **changes.get("engine", {})}
    graph = build(runtime="trtllm", **changes)
    runtime_of("trtllm").check_installed(graph.spec, CONTEXT)
    (spec,) = (each for each in process_specs(graph, CONTEXT) if each.role == role)
    done = subprocess.run(
        filled_argv(spec, {"port": 8001}),
        env={"PATH": "/usr/bin:/bin", **filled_env(spec, {"port": 8001})},
        check=True,
        capture_output=True,
        text=True,
    )
    config, words = done.stdout.split("ARGS\n")
    return yaml.safe_load(config), words.splitlines()


def test_a_context_server_gets_its_flags_and_a_file(build, tmp_path):
    """With metrics, without overlap; the user's own arguments come last."""
    config, words = started(
        build,
        tmp_path,
        "prefill",
        model={"contextTokens": 4096},
        engine={"kvBlocks": 100, "maxRunningRequests": 8, "maxBatchTokens": 2048},
        services={"prefill": {"gpusPerReplica": 2, "args": ["--trust_remote_code"]}},
    )
    assert config == {
        "return_perf_metrics": True,
        "enable_iter_perf_stats": True,
        "kv_cache_config": {"max_tokens": 3200},
        "cache_transceiver_config": {"backend": "DEFAULT"},
        "disable_overlap_scheduler": True,
    }
    assert words == [
        "meta/llama", "--served_model_name", "llama", "--host", "127.0.0.1", "--port", "8001",
        "--tensor_parallel_size", "2", "--max_seq_len", "4096", "--max_batch_size", "8",
        "--max_num_tokens", "2048", "--trust_remote_code",
    ]  # fmt: skip


def test_a_generation_server_overlaps(build, tmp_path):
    """And has the manifest's blocks and stream interval."""
    config, _ = started(
        build, tmp_path, "decode", engine={"kvBlocks": 10, "blockTokens": 64, "streamIntervalTokens": 4}
    )
    assert config == {
        "return_perf_metrics": True,
        "enable_iter_perf_stats": True,
        "kv_cache_config": {"tokens_per_block": 64, "max_tokens": 640},
        "cache_transceiver_config": {"backend": "DEFAULT"},
        "stream_interval": 4,
    }


def test_a_file_of_the_users_is_added(build, tmp_path):
    """Its keys win; its marks of a document would make two of it."""
    (tmp_path / "own.yaml").write_text("---\ncache_transceiver_config:\n  backend: UCX\nmax_beam_width: 2\n")
    env = [{"name": "TRTLLM_SERVE_CONFIG_FILE", "value": str(tmp_path / "own.yaml")}]

    config, _ = started(build, tmp_path, "decode", services={"decode": {"env": env}})

    assert config == {
        "return_perf_metrics": True,
        "enable_iter_perf_stats": True,
        "cache_transceiver_config": {"backend": "UCX"},
        "max_beam_width": 2,
    }


def test_a_machine_without_it_is_told_so(build, monkeypatch):
    """In words that name the setting."""
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(InvalidSpecError, match="trtllm-serve is not a program here"):
        runtime_of("trtllm").check_installed(build(runtime="trtllm").spec, CONTEXT)


def test_decode_gets_what_prefill_answered():
    """Unread, as a generation-only request; each prompt by a number above those that servers give themselves."""
    kv_transfer = runtime_of("trtllm").kv_transfer
    asked = kv_transfer.prefill_fields(SOURCE)["disaggregated_params"]
    choice = {"finish_reason": "not_finished", "disaggregated_params": PARAMS}

    given = kv_transfer.decode_fields(SOURCE, {"choices": [choice]})

    assert asked == {"request_type": "context_only", "disagg_request_id": (1 << 42) + 5}
    assert given == {"disaggregated_params": {**PARAMS, "request_type": "generation_only"}}


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {},
        {"choices": []},
        {"choices": ["x"]},
        {"choices": [{"finish_reason": "stop", "disaggregated_params": PARAMS}]},
        {"choices": [{"finish_reason": "length", "disaggregated_params": None}]},
    ],
)
def test_decode_computes_a_prompt_of_which_no_kv_was_kept(answer):
    """Where the first token ended the text, or the answer is not as it should be."""
    assert runtime_of("trtllm").kv_transfer.decode_fields(SOURCE, answer) is None


GRAPH = GraphSpec.model_validate(
    {
        "model": {"name": "llama"},
        "runtime": "trtllm",
        "services": {role: {"role": role} for role in ("router", "prefill", "decode")},
        "planner": {"enabled": False},
    }
)


def test_such_a_graph_has_no_leases_and_gives_no_kv_back():
    """A generation server would take the message for a request; the context server's own time-out frees the KV."""
    kv_transfer = runtime_of("trtllm").kv_transfer_of(GRAPH)
    assert (kv_transfer.is_given_back, kv_transfer.is_leased, kv_transfer.engine_of({})) == (
        False,
        False,
        None,
    )
    assert not GRAPH.traits.has_leases
    assert orjson.dumps(runtime_of("trtllm").kv_transfer.prefill_fields(SOURCE))
