"""Settings of one simulated worker, validated against its latency profile; the command line creates them with `resolve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from penstock.api import PreemptionConfig
from penstock.api.base import Number
from penstock.core.clock import SimulatedClock
from penstock.core.errors import ConfigError
from penstock.core.flags import check_bounds, flag, time_scale
from penstock.core.logs import get_logger
from penstock.core.validation import read_json_flag
from penstock.engine import profiles
from penstock.engine.core.batching import RECOMPUTE_TOKENS, BatchLimits
from penstock.engine.core.engine import EngineSettings
from penstock.engine.core.latency import LatencyModel
from penstock.engine.core.lease import LeaseTerms
from penstock.engine.core.preemption import PreemptionTerms
from penstock.engine.core.requests import EngineRole
from penstock.engine.core.transfer import LinkTerms
from penstock.engine.profiles import Profile
from penstock.engine.serve.kv_publisher import KvEventsConfig, parse_events_config

log = get_logger(__name__)

LONGEST_CONTEXT_TOKENS = 131_072
"""Default maximum number of prompt and output tokens, if the KV cache can store more: the context length of the profiled Llama models."""
_LEAST_QUEUE = 2
"""Minimum queue length. Source: Dynamo's minimum, so that one setting is valid for both runtimes."""


class LoadFailurePolicy(StrEnum):
    """Treatment of a request on a decode worker whose KV could not be fetched; the values are vLLM's.

    Attributes:
        FAIL: The request fails.
        RECOMPUTE: The prompt is computed on the decode worker, and the request continues.
    """

    FAIL = "fail"
    RECOMPUTE = "recompute"


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """Command-line options before validation; the help text of each field is shown by the command line."""

    model: str
    profile: str = flag(
        "Latency profile: a name from `penstock engine profiles`, or a .yaml file.",
        default="h200-llama-3.1-8b-tp1",
    )
    role: EngineRole = flag(
        "prefill keeps KV for decode workers, decode fetches it, both does what each request says; aggregated does both phases alone.",
        default=EngineRole.AGGREGATED,
    )
    served_names: tuple[str, ...] = flag(
        "Name that requests use; may be repeated.", name="--served-model-name", default=(), unset="MODEL"
    )
    lora_modules: tuple[str, ...] = flag(
        "NAME=PATH of a LoRA adapter; may be repeated. Its requests have KV and answers of their own; no file is read.",
        default=(),
    )
    host: str = flag("Address to listen on.", default="127.0.0.1")
    port: int = flag("TCP port to listen on; 0 takes a free one.", default=8000, ge=0, le=65535)
    ssl_certfile: Path | None = flag(
        "Certificate, PEM: the worker then speaks https.", default=None, path="file"
    )
    ssl_keyfile: Path | None = flag("Its key, PEM.", default=None, path="file")
    kv_host: str | None = flag(
        "Address that decode workers reach this one at.",
        variable="VLLM_NIXL_SIDE_CHANNEL_HOST",
        unset="--host",
    )
    speed: float = time_scale()
    block_size: int = flag("Tokens per KV block.", default=16, ge=1)
    num_gpu_blocks_override: int | None = flag("KV blocks.", ge=1, unset="the profile's capacity")
    max_num_seqs: int = flag("Requests in one batch.", default=256, ge=1)
    max_num_batched_tokens: int | None = flag(
        "Tokens computed in one step.", ge=1, unset="8192, or --max-num-seqs if that is more"
    )
    max_model_len: int | None = flag(
        "Longest prompt plus output, tokens.",
        ge=1,
        unset=f"what the KV cache holds, at most {LONGEST_CONTEXT_TOKENS}",
    )
    enable_prefix_caching: bool = flag(
        "Reuse KV blocks of equal prefixes.",
        name="--enable-prefix-caching/--no-enable-prefix-caching",
        default=True,
    )
    stream_interval: int = flag("Tokens per streamed event.", default=1, ge=1)
    scheduling_policy: str = flag(
        "Order of waiting requests; priority: lower values first, ties by arrival.",
        default="fcfs",
        choices=("fcfs", "priority"),
    )
    preemption_config: str | None = flag(
        "JSON: maxPerRequest, premiumReservedFraction, swapGigabytes, dropAboveSeconds, swapLinkGigabytesPerSecond "
        "(of one GPU), swapLinkLatencyMs. Waiting requests of lower priority values then preempt running ones of "
        "higher; needs --scheduling-policy priority.",
        unset="as vLLM",
    )
    kv_transfer_config: str | None = flag(
        "vLLM's JSON: kv_role, kv_load_failure_policy, kv_connector_extra_config.kv_lease_duration (seconds).",
        default=None,
    )
    kv_events_config: str | None = flag(
        "vLLM's JSON: enable_kv_cache_events, endpoint, topic. Changes of the KV cache are then published over ZMQ; "
        "needs penstock[kv-events].",
        default=None,
    )
    link_gigabytes_per_s: float = flag(
        "Bandwidth of the simulated incoming KV link.",
        name="--kv-link-gigabytes-per-second",
        default=25.0,
        gt=0,
    )
    link_latency_ms: float = flag(
        "Fixed time of each simulated KV transfer, milliseconds.",
        name="--kv-link-latency-ms",
        default=5.0,
        ge=0,
    )
    mean_output_tokens: float = flag(
        "Mean length at which the simulated model ends by itself, tokens; ignore_eos overrides it.",
        default=256.0,
        ge=1,
    )
    startup_s: float = flag(
        "Simulated seconds until the worker is ready; /health answers 503 until then.",
        name="--startup-seconds",
        default=0.0,
        ge=0,
    )
    engine_request_limit: int | None = flag(
        "Maximum number of requests in the engine at a time; beyond it and the queue requests are rejected with 503.",
        ge=1,
        unset="no limit",
    )
    engine_request_queue: int = flag(
        "Maximum number of requests that wait for the engine once --engine-request-limit run; at least 2.",
        default=16,
        ge=_LEAST_QUEUE,
    )
    seed: int = flag("Chooses output lengths and words.", default=0)


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """Validated settings of one simulated worker.

    Attributes:
        flags: Command-line options.
        profile: Latency profile.
        engine: Settings of the engine.
        max_model_len: Maximum number of prompt and output tokens together.
        served_names: Names of the model in requests.
        load_failure: Treatment of requests whose KV could not be fetched.
        kv_events: Configuration of KV events.
        is_bidirectional: Whether decode workers keep the KV of conversations for the next turn, and prefill workers
            fetch it.
        adapters: Path of each LoRA adapter, by its name in requests.
    """

    flags: ServeFlags
    profile: profiles.Profile
    engine: EngineSettings
    max_model_len: int
    served_names: tuple[str, ...]
    load_failure: LoadFailurePolicy = field(default=LoadFailurePolicy.FAIL)
    kv_events: KvEventsConfig = field(default_factory=KvEventsConfig)
    is_bidirectional: bool = False
    adapters: Mapping[str, str] = field(default_factory=dict)

    @property
    def scheme(self) -> str:
        """Scheme of the HTTP endpoints of this worker and of the other workers in its graph."""
        return "http" if self.flags.ssl_certfile is None else "https"

    def latency(self) -> LatencyModel:
        """Return the latency model of the profile."""
        return self.profile.latency()

    def longest_tokens(self, priority: int) -> int:
        """Return the maximum number of prompt and output tokens of a request with this priority.

        Requests below the tier premium must fit without the blocks that are reserved for premium, or they would wait
        forever.
        """
        return min(self.max_model_len, self.engine.longest_tokens(priority))


class _ExtraConfig(BaseModel):
    model_config = ConfigDict(extra="allow")

    kv_lease_duration: float = Field(default=30, gt=0, allow_inf_nan=False)
    decoder_kv_blocks_ttl: float = Field(default=480, gt=0, allow_inf_nan=False)
    bidirectional_kv_xfer: bool = False
    kv_recompute_threshold: int = Field(default=RECOMPUTE_TOKENS, ge=0)


_WITHOUT_MEANING = {
    "engine_id",
    "kv_buffer_device",
    "kv_port",
    "kv_connector_module_path",
    "enable_permute_local_kv",
}
"""Keys of vLLM's configuration that have no effect here."""


class _KvTransferConfig(BaseModel):
    model_config = ConfigDict(extra="forbid")

    kv_connector: Literal["NixlConnector", "NixlPullConnector"] = "NixlConnector"
    kv_role: Literal["kv_producer", "kv_consumer", "kv_both"] | None = None
    kv_load_failure_policy: LoadFailurePolicy = LoadFailurePolicy.FAIL
    kv_connector_extra_config: _ExtraConfig = Field(default_factory=_ExtraConfig)
    engine_id: str | None = None
    kv_buffer_device: str | None = None
    kv_port: int | None = None
    kv_connector_module_path: str | None = None
    enable_permute_local_kv: bool | None = None


_ROLE_OF_KV_ROLE = {"kv_producer": EngineRole.PREFILL, "kv_consumer": EngineRole.DECODE}


def resolve(flags: ServeFlags) -> ServeSettings:
    """Validate ``flags`` and compute the settings that they leave open.

    Raises:
        ConfigError: A value is out of its bounds or contradicts another; the message names flag, value and remedy.
    """
    SimulatedClock(flags.speed)  # raises for an invalid --speed
    check_bounds(flags)
    if (flags.ssl_certfile is None) is not (flags.ssl_keyfile is None):
        raise ConfigError("--ssl-certfile and --ssl-keyfile belong together; give both, or neither")
    profile = profiles.load(flags.profile)
    transfer = _parse_transfer_config(flags)
    kv_events = parse_events_config(flags.kv_events_config)
    batched = flags.max_num_batched_tokens or max(8192, flags.max_num_seqs)
    if batched < flags.max_num_seqs:
        raise ConfigError(
            f"--max-num-batched-tokens {batched} is below --max-num-seqs {flags.max_num_seqs}: "
            "a step must hold one token of each sequence; raise the one or lower the other"
        )
    blocks = flags.num_gpu_blocks_override or profile.kv_capacity_tokens // flags.block_size
    capacity = blocks * flags.block_size
    preemption = _parse_preemption(flags, profile)
    longest = flags.max_model_len or min(LONGEST_CONTEXT_TOKENS, capacity)
    if longest > capacity:
        raise ConfigError(
            f"--max-model-len {longest} exceeds the KV cache of {capacity} tokens "
            f"({blocks} blocks of {flags.block_size}): lower it, or raise --num-gpu-blocks-override"
        )
    extra = transfer.kv_connector_extra_config
    limits = BatchLimits(
        max_num_batched_tokens=batched,
        max_num_seqs=flags.max_num_seqs,
        block_size=flags.block_size,
        by_priority=flags.scheduling_policy == "priority",
        least_load_tokens=max(1, extra.kv_recompute_threshold),
    )
    engine = EngineSettings(
        role=flags.role,
        num_blocks=blocks,
        kv_bytes_per_token=profile.kv.bytes_per_token,
        limits=limits,
        lease=LeaseTerms(extra.kv_lease_duration, extra.decoder_kv_blocks_ttl),
        link=LinkTerms(flags.link_latency_ms / 1000, flags.link_gigabytes_per_s * 1e9),
        records_cache_changes=kv_events.is_on,
        preemption=preemption,
        ranks=profile.tensor_parallel,
    )
    names = flags.served_names or (flags.model,)
    return ServeSettings(
        flags,
        profile,
        engine,
        longest,
        names,
        transfer.kv_load_failure_policy,
        kv_events,
        extra.bidirectional_kv_xfer,
        _parse_adapters(flags.lora_modules, names),
    )


def _parse_adapters(modules: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for each in modules:
        name, _, path = each.partition("=")
        if not name or not path:
            raise ConfigError(f"--lora-modules {each}: is not a NAME=PATH; write it as sql=/adapters/sql")
        if name in found or name in names:
            raise ConfigError(
                f"--lora-modules {each}: {name} is served already; give the adapter a name of its own"
            )
        found[name] = path
    return found


def _parse_preemption(flags: ServeFlags, profile: profiles.Profile) -> PreemptionTerms | None:
    if flags.preemption_config is None:
        return None
    if flags.scheduling_policy != "priority":
        raise ConfigError(
            f"--preemption-config needs --scheduling-policy priority, which is {flags.scheduling_policy}: "
            "set it, or remove the configuration"
        )
    config = read_json_flag(PreemptionFlag, flags.preemption_config, "--preemption-config")
    return config.terms(profile, flags.block_size)


def _parse_transfer_config(flags: ServeFlags) -> _KvTransferConfig:
    if flags.kv_transfer_config is None:
        return _KvTransferConfig()
    config = read_json_flag(_KvTransferConfig, flags.kv_transfer_config, "--kv-transfer-config")
    expected = _ROLE_OF_KV_ROLE.get(config.kv_role or "", flags.role)
    if flags.role is EngineRole.BOTH and config.kv_connector_extra_config.bidirectional_kv_xfer:
        raise ConfigError(
            "--kv-transfer-config: bidirectional_kv_xfer does not go with --role both: a kept block would be prefill's or decode's;"
            " remove it"
        )
    if expected is not flags.role:
        raise ConfigError(
            f"--kv-transfer-config: kv_role {config.kv_role} belongs to --role {expected}, "
            f"but --role is {flags.role}; change one of them"
        )
    ignored = {
        *(config.model_fields_set & _WITHOUT_MEANING),
        *(config.kv_connector_extra_config.model_extra or ()),
    }
    if ignored:
        log.info("kv-transfer-config keys without meaning here are ignored", keys=sorted(ignored))
    return config


DEFAULT_PREEMPTIONS, DEFAULT_RESERVED_FRACTION = 3, 0.1
"""Defaults of the maximum number of preemptions per request, and of the fraction of KV blocks reserved for premium. Chosen;
the documentation of `PreemptionConfig` states them."""


class PreemptionFlag(PreemptionConfig):
    """JSON value of ``--preemption-config``: the keys of ``spec.engine.preemption``, and those of the link to host memory.

    By default the link is PCIe 4.0 x16 with 25 GB/s in practice per GPU.
    """

    swap_link_gigabytes_per_second: Annotated[Number, Field(gt=0)] = 25.0
    swap_link_latency_ms: Annotated[Number, Field(ge=0)] = 1.0

    def terms(self, profile: Profile, block_size: int) -> PreemptionTerms:
        """Return the limits of preemption for a worker with ``profile`` and KV blocks of ``block_size`` tokens."""
        block_bytes = profile.kv.bytes_per_token * block_size
        bytes_per_s = self.swap_link_gigabytes_per_second * 1e9 * profile.tensor_parallel
        most, reserved = self.max_per_request, self.premium_reserved_fraction
        return PreemptionTerms(
            max_per_request=DEFAULT_PREEMPTIONS if most is None else most,
            reserved_fraction=DEFAULT_RESERVED_FRACTION if reserved is None else reserved,
            host_blocks=int((self.swap_gigabytes or 0) * 1e9 // block_bytes),
            host_link=LinkTerms(self.swap_link_latency_ms / 1000, bytes_per_s),
            drop_above_s=self.drop_above_seconds,
        )
