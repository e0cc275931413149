"""Flags of a worker: defaults that follow from the profile, and refusals that name the remedy."""

import json

import pytest

from penstock.core.errors import ConfigError
from penstock.engine.core.requests import EngineRole
from penstock.engine.core.transfer import LinkTerms
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
    assert settings.engine.preemption is None
    assert resolve(flags(num_gpu_blocks_override=100)).max_model_len == 1600
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


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"profile": "h300"}, "--profile 'h300' is unknown; choose one of a100-"),
        ({"block_size": 0}, "--block-size: 0 must be at least 1"),
        ({"max_num_seqs": -1}, "--max-num-seqs: -1"),
        ({"engine_request_limit": 0}, "--engine-request-limit: 0 must be at least 1"),
        ({"engine_request_queue": 1}, "--engine-request-queue: 1 must be at least 2"),
        ({"stream_interval": 0}, "--stream-interval"),
        ({"num_gpu_blocks_override": 0}, "--num-gpu-blocks-override"),
        ({"max_model_len": 300_000}, "--max-model-len 300000 exceeds the KV cache of 224128 tokens"),
        ({"max_num_batched_tokens": 100}, "--max-num-batched-tokens 100 is below --max-num-seqs 256"),
        ({"mean_output_tokens": 0.5}, "--mean-output-tokens"),
        ({"mean_output_tokens": float("nan")}, "--mean-output-tokens"),
        ({"link_gigabytes_per_s": 0.0}, "--kv-link-gigabytes-per-second: 0.0 must be finite and above 0"),
        ({"link_latency_ms": -1.0}, "--kv-link-latency-ms: -1.0 must be finite and at least 0"),
        ({"startup_s": float("inf")}, "--startup-seconds"),
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
            {
                "role": EngineRole.BOTH,
                "kv_transfer_config": '{"kv_connector_extra_config": {"bidirectional_kv_xfer": true}}',
            },
            "bidirectional_kv_xfer does not go with --role both",
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


def tiered_flags(config=None, **changes):
    """Return tiered_flags of a 70B worker on eight GPUs with 1,000 blocks."""
    given = {"model": "m", "profile": "a100-llama-70b-bf16-tp8", "num_gpu_blocks_override": 1000}
    given["scheduling_policy"] = "priority"
    return ServeFlags(**{**given, "preemption_config": config and json.dumps(config), **changes})


def test_host_memory_becomes_blocks_and_links_add_up():
    """16 tokens of 327,680 B are 5.24 MB a block; eight GPUs copy at once."""
    terms = resolve(tiered_flags({"swapGigabytes": 64, "maxPerRequest": 2})).engine.preemption
    assert (terms.max_per_request, terms.reserved_fraction, terms.host_blocks) == (2, 0.1, 12207)
    assert terms.host_link == LinkTerms(0.001, 200e9)


def test_the_longest_request_fits_beside_the_reserve():
    """A request of a lower tier must never wait for what it may not have; premium's may be longer."""
    settings = resolve(tiered_flags({"premiumReservedFraction": 0.25}))
    assert [settings.longest_tokens(priority) for priority in (-1, 0, 1, 2)] == [16000, 16000, 12000, 12000]
    bounded = resolve(tiered_flags({"premiumReservedFraction": 0.25}, max_model_len=8000))
    assert bounded.longest_tokens(2) == 8000


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"maxPerRequest": -1}, "maxPerRequest: Input should be greater than or equal to 0"),
        ({"maxPerRequest": True}, "maxPerRequest: Input should be a valid integer"),
        ({"premiumReservedFraction": 1}, "premiumReservedFraction: Input should be less than 1"),
        ({"dropAboveSeconds": 0}, "dropAboveSeconds: Input should be greater than 0"),
        ({"swapGigabyte": 1}, "swapGigabyte: Extra inputs are not permitted"),
    ],
)
def test_bad_values_are_named(config, message):
    """With their key and bound."""
    with pytest.raises(ConfigError, match=message):
        resolve(tiered_flags(config))


def test_preemption_needs_the_priority_policy():
    """An option without effect is refused."""
    with pytest.raises(ConfigError, match="needs --scheduling-policy priority, which is fcfs"):
        resolve(tiered_flags({"maxPerRequest": 1}, scheduling_policy="fcfs"))
