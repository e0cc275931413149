"""Dynamo's SGLang workers become SGLang's own servers, before Penstock's router in place of Dynamo's frontend."""

from __future__ import annotations

from typing import Any, Final

from penstock.api.manifests.foreign import ManifestSource
from penstock_dynamo.importer.command import Command
from penstock_dynamo.importer.component import Component
from penstock_dynamo.importer.flags import share_flags

_FLAGS: Final = {
    "name": ("--model-path", "--model"),
    "servedName": ("--served-model-name",),
    "contextTokens": ("--context-length",),
    "blockTokens": ("--page-size",),
    "maxRunningRequests": ("--max-running-requests",),
    "maxBatchTokens": ("--chunked-prefill-size",),
}
"""Flags of the server, by the key of a graph that says the same once for all workers."""
_OWNED: Final = (
    "--host",
    "--port",
    "--disaggregation-bootstrap-port",
    "--nnodes",
    "--node-rank",
    "--dist-init-addr",
)
"""Flags that the runtime gives itself."""
_SWITCHES: Final = {
    "--skip-tokenizer-init": "leaves the tokens to Dynamo's frontend; SGLang's own server makes them",
    "--use-sglang-tokenizer": "is what SGLang's own server does",
    "--enable-metrics": "is given by the runtime",
}
_EVENTS: Final = "--kv-events-config"
_WHY: Final = {
    _EVENTS: "publishes KV events, which the router does not read of SGLang; it keeps a record of its own"
}
_TENSOR: Final = ("--tp", "--tp-size", "--tensor-parallel-size")
_IMAGE: Final = (
    "has to hold SGLang 0.5.23 and its command `sglang`, which the runtime starts in place of dynamo.sglang"
)


def read_worker_flags(component: Component, spec: dict[str, Any]) -> None:
    """Move a worker's flags to the graph's model and engine; the rest stay the service's arguments."""
    command, args = component.command, component.args
    if command is None:
        return
    share_flags(component, command, spec, _FLAGS)
    _leave_out(args, command)
    backend = command.pop_value("--disaggregation-transfer-backend")
    if backend not in {None, "nixl"}:
        command.words += ["--disaggregation-transfer-backend", str(backend)]
    tensor = command.pop_value(*_TENSOR)
    if tensor is not None and tensor != str(component.gpus):
        command.words += ["--tensor-parallel-size", tensor]
    if command.words:
        component.service["args"] = command.words
    if "image" in component.service:
        component.container.at("image").note(_IMAGE, component.service["image"])


def _leave_out(args: ManifestSource, command: Command) -> None:
    """Leave out the flags that the runtime gives, and those of Dynamo's wrapper around SGLang."""
    for switch, why in _SWITCHES.items():
        if command.pop_flag(switch):
            args.note(why, switch)
    wrapper = [word.partition("=")[0] for word in command.words if word.startswith("--dyn-")]
    for flag in (*_OWNED, _EVENTS, *wrapper):
        value = command.pop_value(flag)
        if value is not None:
            is_wrappers = f"{flag} is a flag of Dynamo's wrapper around SGLang"
            args.note(
                _WHY.get(flag, is_wrappers if flag in wrapper else f"{flag} is chosen by the runtime"), value
            )
