"""Stands for SGLang's compiled kernels on a processor for which its index has none.

Every name exists, so that SGLang's modules import, and raises where it is called: with ``--attention-backend torch_native``
a Llama needs none of them. KV is transferred out of host memory, which SGLang 0.5.23 takes for a GPU's.
"""

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.4.10"
__path__ = []


class _Absent:
    """A kernel that is not there."""

    def __init__(self, name):
        self._name = name

    def __call__(self, *args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{self._name} is not built for this processor")

    def __getattr__(self, name):
        return _absent(f"{self._name}.{name}")


def _absent(name):
    if name.rpartition(".")[2].startswith("__"):
        raise AttributeError(name)
    return _Absent(name)


def __getattr__(name):
    return _absent(name)


class _Modules:
    """Finds every module below `sgl_kernel`."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__path__ = []
        prefix = spec.name.removeprefix("sgl_kernel.")
        module.__getattr__ = lambda name: _absent(f"{prefix}.{name}")
        return module

    def exec_module(self, module):
        pass


def _keep_kv_in_host_memory(module):
    module._normalize_kv_mem_kinds = lambda kinds, expected_len: ["DRAM"] * expected_len
    module._unpack_kv_mem_kinds = lambda buf, expected_len: ["DRAM"] * expected_len


def _register_nothing_with_cuda(module):
    module._cuda_host_register = lambda *args, **kwargs: None


_CHANGED = {
    "sglang.srt.disaggregation.nixl.conn": _keep_kv_in_host_memory,
    "sglang.srt.mem_cache.pool_host.common": _register_nothing_with_cuda,
}


class _Changes:
    """Changes some modules of SGLang once they are loaded."""

    def find_spec(self, name, path=None, target=None):
        change = _CHANGED.get(name)
        if change is None:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        load = spec.loader.exec_module

        def exec_module(module):
            load(module)
            change(module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path[:0] = [_Changes(), _Modules()]
