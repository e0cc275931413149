"""Finds out which runtime's metrics a Prometheus has, of those that are registered; those of two runtimes are here."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from penstock.core import metric_names as names
from penstock.core.engine_metrics import GROUP, EngineMetrics
from penstock.core.plugins import plugin, registered

_FORMER_KV_USAGE = tuple(old for old, new in names.FORMER_NAMES.items() if new == names.VLLM_KV_USAGE)

VLLM: Final = EngineMetrics(
    "vllm",
    "model_name",
    prompt_tokens=(names.VLLM_REQUEST_PROMPT_TOKENS,),
    answer_tokens=(names.VLLM_REQUEST_GENERATION_TOKENS,),
    ttft=(names.VLLM_TTFT,),
    gap=(names.VLLM_ITL, "vllm:time_per_output_token_seconds", names.VLLM_TPOT),
    running=(names.VLLM_RUNNING,),
    waiting=(names.VLLM_WAITING,),
    kv_usage=(names.VLLM_KV_USAGE, *_FORMER_KV_USAGE),
    cache_tokens=(
        (
            names.VLLM_PREFIX_QUERIES + names.COUNTER_SUFFIX,
            names.VLLM_PREFIX_HITS + names.COUNTER_SUFFIX,
        ),
    ),
    cache_config=names.VLLM_CACHE_CONFIG_INFO,
)

TGI: Final = EngineMetrics(
    "tgi",
    None,
    prompt_tokens=("tgi_request_input_length",),
    answer_tokens=("tgi_request_generated_tokens",),
    gap=("tgi_request_mean_time_per_token_duration",),
    running=("tgi_batch_current_size",),
    waiting=("tgi_queue_size",),
)
"""Metrics of text-generation-inference, which exports neither a model's name nor the time to the first token. Source: its
documentation."""


def engines() -> list[EngineMetrics]:
    """Return what each installed package registers."""
    found = [plugin(GROUP, name) for name in registered(GROUP)]
    return [each for each in found if isinstance(each, EngineMetrics)]


def present(candidates: Collection[str], known: Collection[str], *, suffix: str = "") -> str | None:
    """Return the first name that the server has; with a suffix, that of one of a metric's series."""
    return next((each for each in candidates if each + suffix in known), None)


def engines_in(known: Collection[str]) -> list[EngineMetrics]:
    """Return the runtimes of which the server has any metric, those with histograms of tokens first."""
    found = [each for each in engines() if _has_any(each, known)]
    return sorted(found, key=lambda each: present(each.prompt_tokens, known, suffix="_bucket") is None)


def _has_any(engine: EngineMetrics, known: Collection[str]) -> bool:
    histograms = (*engine.prompt_tokens, *engine.answer_tokens, *engine.ttft, *engine.gap)
    return any(f"{each}_bucket" in known for each in histograms) or any(
        each in known for each in (*engine.running, *engine.waiting)
    )
