"""Which resources of a node are accelerators, that a graph's budget counts. Pure."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Final

GPU_RESOURCES: Final = (
    "*/gpu",
    "*/gpu.shared",
    "*/mig-*",
    "aws.amazon.com/neuron*",
    "gpu.intel.com/*",
    "google.com/tpu",
    "habana.ai/gaudi*",
)
"""Names, or patterns of names, of what the device plugins of NVIDIA, AMD, Intel, Habana, Google and AWS offer; the chart's
``operator.gpuResources`` replaces them."""


def is_accelerator(resource: str, known: tuple[str, ...] = GPU_RESOURCES) -> bool:
    """Return whether a resource is one of the known accelerators."""
    return any(fnmatchcase(resource, pattern) for pattern in known)
