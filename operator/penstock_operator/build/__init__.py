"""Pure: a graph becomes the objects that it needs, one kind per file."""

from penstock_operator.build.children import BuildContext, adapter, children
from penstock_operator.build.pod import gpu_ceiling

__all__ = ["BuildContext", "adapter", "children", "gpu_ceiling"]
