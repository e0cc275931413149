"""Flags of a worker: defaults that follow from the profile, and refusals that name the remedy."""

import pytest

from penstock.core.errors import ConfigError
from penstock.engine.core.requests import EngineRole
from penstock.engine.serve.settings import LoadFailurePolicy, ServeFlags, resolve

PROFILE = "h100-llama-3.3-70b-tp2"


def flags(**changes):
    """Flags of a worker on a small profile."""
    return ServeFlags(**{"model": "llama", "profile": PROFILE, **changes})


def test_defaults_follow_the_profile():
    """Blocks come from the capacity, the longest sequence from 131,072, limits from vLLM."""
    settings = resolve(flags())
    assert settings.engine.num_blocks == 224_133 // 16
    assert settings.max_model_len == 131_072
    assert settings.engine.limits.max_num_batched_tokens == 8192
    assert settings.engine.kv_bytes_per_token == 327_680
    assert settings.served_names == ("llama",)
    assert settings.load_failure is LoadFailurePolicy.FAIL
    assert settings.engine.lease.duration_s == 30


def test_small_caches_shorten_the_longest_sequence():
    """Without --max-model-len a sequence may fill the cache."""
    assert resolve(flags(num_gpu_blocks_override=100)).max_model_len == 1600


def test_many_sequences_raise_the_token_budget():
    """A step holds at least one token of each sequence."""
    assert resolve(flags(max_num_seqs=10_000)).engine.limits.max_num_batched_tokens == 10_000


def test_transfer_config_sets_lease_and_policy():
    """The JSON of vLLM is understood; keys without meaning here are ignored."""
    text = (
        '{"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_buffer_device": "cpu",'
        ' "kv_load_failure_policy": "recompute",'
        ' "kv_connector_extra_config": {"kv_lease_duration": 12, "backends": ["UCX"]}}'
    )
    settings = resolve(flags(role=EngineRole.DECODE, kv_transfer_config=text))
    assert settings.engine.lease.duration_s == 12
    assert settings.load_failure is LoadFailurePolicy.RECOMPUTE


def test_prompts_may_be_sped_up_and_decode_is_not():
    """For measuring decode alone: a hundredth of the profile's prefill, every decode step as it is."""
    plain, fast = resolve(flags()).latency(), resolve(flags(prefill_speedup=100.0)).latency()
    assert fast.prefill.ttft_s(4000) == pytest.approx(plain.prefill.ttft_s(4000) / 100)
    assert fast.step_s([], 64, 64 * 3075) == plain.step_s([], 64, 64 * 3075)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"profile": "h300"}, "--profile 'h300' is unknown; choose one of a100-"),
        ({"block_size": 0}, "--block-size: 0 must be at least 1"),
        ({"max_num_seqs": -1}, "--max-num-seqs: -1"),
        ({"stream_interval": 0}, "--stream-interval"),
        ({"num_gpu_blocks_override": 0}, "--num-gpu-blocks-override"),
        ({"max_model_len": 300_000}, "--max-model-len 300000 exceeds the KV cache of 224128 tokens"),
        ({"max_num_batched_tokens": 100}, "--max-num-batched-tokens 100 is below --max-num-seqs 256"),
        ({"mean_output_tokens": 0.5}, "--mean-output-tokens"),
        ({"mean_output_tokens": float("nan")}, "--mean-output-tokens"),
        ({"link_gigabytes_per_s": 0.0}, "--kv-link-gigabytes-per-second: 0.0 must be finite and above 0"),
        ({"link_latency_ms": -1.0}, "--kv-link-latency-ms: -1.0 must be finite and at least 0"),
        ({"startup_s": float("inf")}, "--startup-seconds"),
        ({"prefill_speedup": 0.5}, "--prefill-speedup: 0.5 must be finite and at least 1"),
        ({"prefill_speedup": float("inf")}, "--prefill-speedup"),
        ({"scheduling_policy": "lifo"}, "--scheduling-policy: 'lifo' must be fcfs or priority"),
        ({"kv_transfer_config": "{"}, "--kv-transfer-config: JSON"),
        ({"kv_transfer_config": '{"kv_role": "both"}'}, "--kv-transfer-config: kv_role"),
        ({"kv_transfer_config": '{"kv_rolle": "kv_both"}'}, "--kv-transfer-config: kv_rolle: Extra inputs"),
        (
            {"kv_transfer_config": '{"kv_connector": "MooncakeConnector"}'},
            "--kv-transfer-config: kv_connector",
        ),
        (
            {"kv_transfer_config": '{"kv_connector_extra_config": {"kv_lease_duration": "long"}}'},
            "--kv-transfer-config: kv_connector_extra_config.kv_lease_duration",
        ),
        (
            {"kv_transfer_config": '{"kv_connector_extra_config": {"decoder_kv_blocks_ttl": 0}}'},
            "--kv-transfer-config: kv_connector_extra_config.decoder_kv_blocks_ttl",
        ),
        (
            {"kv_transfer_config": '{"kv_connector_extra_config": {"kv_lease_duration": 0}}'},
            "kv_lease_duration: Input should be greater than 0",
        ),
        (
            {"role": EngineRole.DECODE, "kv_transfer_config": '{"kv_role": "kv_producer"}'},
            "kv_role kv_producer belongs to --role prefill, but --role is decode",
        ),
    ],
)
def test_contradictions_are_refused(changes, message):
    """Flag, value and bound are in the message."""
    with pytest.raises(ConfigError, match=message):
        resolve(flags(**changes))
