"""Runtime ``trtllm``: ``trtllm-serve`` as it is, prefill (context) before decode (generation).

Written for TensorRT-LLM 1.3 from its source and documentation; not run.
"""

from __future__ import annotations

import json
from typing import Any, Final

from penstock.api.enums import Role
from penstock.api.graph import GraphSpec
from penstock.api.runtimes import SHIPPED
from penstock.api.service import ServiceSpec
from penstock.runtimes.engine_flags import engine_requests
from penstock.runtimes.programs import check_program, program_of
from penstock.runtimes.protocol import PORT, Runtime, RuntimeContext, WorkerCommand
from penstock_trtllm.context_first import ContextFirst

_CONFIG: Final = "TRTLLM_SERVE_CONFIG"
"""Variable with what the server takes from a file alone, a line a key."""
_FILE: Final = "TRTLLM_SERVE_CONFIG_FILE"
"""Variable with a file of the user's; of a key that comes twice, PyYAML takes the last."""
_START: Final = (
    f'exec "$0" serve --config <(printenv {_CONFIG}; sed \'/^---/d\' "${{{_FILE}:-/dev/null}}") "$@"'
)
"""If a flag comes twice, the last one counts, so ``--config`` in a service's ``args`` takes this one's place."""

_PROGRAM: Final = "trtllm-serve"
_HAS: Final = "TensorRT-LLM, or apply the graph to a cluster, whose images have it (docs/trtllm.md)"


class TrtLlm(Runtime):
    """TensorRT-LLM behind Penstock's router."""

    traits = SHIPPED["trtllm"]
    kv_transfer = ContextFirst()

    def worker(self, spec: GraphSpec, service: ServiceSpec, context: RuntimeContext) -> WorkerCommand:
        """Return the command of one server; bash hands it its configuration as a file."""
        argv = [
            "bash",
            "-c",
            _START,
            program_of(spec, _PROGRAM),
            spec.model.name,
            "--served_model_name",
            spec.served_name,
        ]
        argv += ["--host", context.host, "--port", f"{{{PORT}}}"]
        argv += ["--tensor_parallel_size", str(service.gpus_per_replica), *_batch_flags(spec)]
        config = "\n".join(
            f"{key}: {json.dumps(value)}" for key, value in _config(spec, service.role).items()
        )
        return WorkerCommand(tuple(argv), env={_CONFIG: config}, health_path=self.traits.health_path)

    def pod_requests(self, spec: GraphSpec, role: Role, gpus: int) -> dict[str, str]:
        """Return what the server and a process for each GPU need, as vLLM's."""
        del role
        return engine_requests(spec, gpus)

    def check_installed(self, spec: GraphSpec, context: RuntimeContext) -> None:
        """Refuse a program that is not there: its workers would end at their start."""
        del context
        check_program(spec, _PROGRAM, _HAS)


def _batch_flags(spec: GraphSpec) -> list[str]:
    """Return batch flags; a size left at null is left to TensorRT-LLM."""
    engine = spec.engine
    sizes = (
        ("--max_seq_len", spec.model.context_tokens),
        ("--max_batch_size", engine.max_running_requests),
        ("--max_num_tokens", engine.max_batch_tokens),
    )
    return [word for flag, value in sizes if value is not None for word in (flag, str(value))]


def _config(spec: GraphSpec, role: Role) -> dict[str, Any]:
    """Return what has no flag: the metrics, the cache, and the transfer of KV."""
    config: dict[str, Any] = {"return_perf_metrics": True, "enable_iter_perf_stats": True}
    blocks, block_tokens = spec.engine.kv_blocks, spec.engine.block_tokens
    cache = {} if block_tokens is None else {"tokens_per_block": block_tokens}
    if blocks is not None:
        cache["max_tokens"] = blocks * (block_tokens or _BLOCK_TOKENS)
    if cache:
        config["kv_cache_config"] = cache
    if role is not Role.AGGREGATED:
        config["cache_transceiver_config"] = {"backend": "DEFAULT"}
    if role is Role.PREFILL:
        # Its documentation asks for it of context servers.
        config["disable_overlap_scheduler"] = True
    if spec.engine.stream_interval_tokens != 1:
        config["stream_interval"] = spec.engine.stream_interval_tokens
    return config


_BLOCK_TOKENS: Final = 32
"""TensorRT-LLM's default of ``tokens_per_block``."""
