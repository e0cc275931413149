"""Pure: a graph becomes the objects that it needs, with their pods and rights."""

from penstock_operator.resources.children import BuildContext, adapter, children
from penstock_operator.resources.pod import gpu_ceiling

__all__ = ["BuildContext", "adapter", "children", "gpu_ceiling"]
