"""Dynamo's TensorRT-LLM workers become ``trtllm-serve``, before Penstock's router in place of Dynamo's frontend."""

from __future__ import annotations

from typing import Any, Final

from penstock.api.manifests.foreign import ManifestSource
from penstock_dynamo.importer.command import Command
from penstock_dynamo.importer.component import Component
from penstock_dynamo.importer.flags import share_flags

CONFIG_FILE: Final = "TRTLLM_SERVE_CONFIG_FILE"
"""Variable of `penstock_trtllm.runtime` with the file that is added to its own."""

_FLAGS: Final = {
    "name": ("--model-path", "--model"),
    "servedName": ("--served-model-name",),
    "contextTokens": ("--max-seq-len",),
    "blockTokens": ("--kv-block-size",),
    "maxRunningRequests": ("--max-batch-size",),
    "maxBatchTokens": ("--max-num-tokens",),
}
"""Flags of the server, by the key of a graph that says the same once for all workers."""
_CONFIG: Final = ("--extra-engine-args", "--trtllm.extra_engine_args")
_KEPT: Final = {
    "--pipeline-parallel-size": "--pipeline_parallel_size",
    "--expert-parallel-size": "--moe_expert_parallel_size",
    "--free-gpu-memory-fraction": "--kv_cache_free_gpu_memory_fraction",
}
"""Flags that ``trtllm-serve`` spells otherwise."""
_WHY: Final = {
    "--override-engine-args": "is merged by Dynamo's wrapper alone; write its keys into the file of --extra-engine-args",
    "--disaggregation-strategy": "is the order prefill, then decode, which the router has",
    "--publish-events-and-metrics": "publishes KV events, which the router does not read of TensorRT-LLM, and metrics, which the runtime asks for",
    "--publish-kv-events": "publishes KV events, which the router does not read of TensorRT-LLM; it keeps a record of its own",
}
_IMAGE: Final = "has to hold TensorRT-LLM 1.3 and its command `trtllm-serve`, which the runtime starts in place of dynamo.trtllm"


def read_worker_flags(component: Component, spec: dict[str, Any]) -> None:
    """Move a worker's flags to the graph's model and engine; those that ``trtllm-serve`` has stay the service's arguments."""
    command, args = component.command, component.args
    if command is None:
        return
    share_flags(component, command, spec, _FLAGS)
    tensor = command.pop_value("--tensor-parallel-size", "--tp")
    kept = [] if tensor in {None, str(component.gpus)} else ["--tensor_parallel_size", str(tensor)]
    for flag, own in _KEPT.items():
        given = command.pop_value(flag)
        kept += [] if given is None else [own, given]
    config = command.pop_value(*_CONFIG)
    if config is not None:
        command.env[CONFIG_FILE] = config
    _leave_out(args, command)
    if kept:
        component.service["args"] = kept
    if "image" in component.service:
        component.container.at("image").note(_IMAGE, component.service["image"])


def _leave_out(args: ManifestSource, command: Command) -> None:
    """Report what is of Dynamo's wrapper around TensorRT-LLM, which is all that is left."""
    at = 0
    while at < len(command.words):
        flag, has_value, value = command.words[at].partition("=")
        at += 1
        if not has_value and at < len(command.words) and not command.words[at].startswith("-"):
            value = command.words[at]
            at += 1
        args.note(_WHY.get(flag, f"{flag} is a flag of Dynamo's wrapper around TensorRT-LLM"), value or flag)
    command.words = []
