"""Pure functions that build a graph's Kubernetes objects, including its pods and RBAC rights."""

from penstock_operator.resources.allowances import Allowances, allowances_of
from penstock_operator.resources.children import BuildContext, adapter, children
from penstock_operator.resources.files import absent_files

__all__ = [
    "Allowances",
    "BuildContext",
    "absent_files",
    "adapter",
    "allowances_of",
    "children",
]
