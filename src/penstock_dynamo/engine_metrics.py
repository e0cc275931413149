"""Names of the metrics of Dynamo's frontend in a Prometheus, for `penstock assess`."""

from __future__ import annotations

from typing import Final

from penstock.core.engine_metrics import EngineMetrics
from penstock_dynamo import metric_names as names

DYNAMO: Final = EngineMetrics(
    "dynamo",
    "model",
    prompt_tokens=(names.INPUT_TOKENS,),
    answer_tokens=(names.OUTPUT_TOKENS,),
    ttft=(names.TTFT,),
    gap=(names.ITL,),
    running=(names.WORKER_INFLIGHT,),
    waiting=(names.UNANSWERED,),
    cache_tokens=((f"{names.INPUT_TOKENS}_sum", f"{names.CACHED_TOKENS}_sum"),),
)
