"""TensorRT-LLM's servers, prefill before decode by ``disaggregated_params``. Reached by entry points alone."""

from __future__ import annotations
