"""Which forms of a kernel launches would compile, counted without a GPU.

Triton makes a form for every combination of constants, argument types and what it sees in runtime
arguments (divisible by 16, equal to 1). Here its own binder says which, and nothing is launched.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import JITFunction, create_function_from_signature

from glm5lab.attention import (
    arguments,
    indexer,
    indexer_paged,
    shared_rows,
    sparse_mla,
    sparse_mla_fp8,
    topk,
)
from glm5lab.attention.tiles import Device, shared_memory_of

Forms = dict[str, set[tuple[Any, ...]]]


@contextmanager
def forms_on(capability: int) -> Iterator[Forms]:
    """In place of launches: the forms by name of the kernel, as a device would compile them."""
    device = Device(capability, 132, shared_memory_of(capability))
    backend = CUDABackend(GPUTarget("cuda", capability, 32))
    forms: Forms = {}

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        bind = create_function_from_signature(self.signature, self.params, backend)
        _, specialization, given = bind(*args, **options)
        key = (*map(str, specialization), *sorted((n, str(v)) for n, v in given.items()))
        forms.setdefault(self.fn.__name__, set()).add(key)

    with ExitStack() as patched:
        patched.enter_context(patch.object(JITFunction, "run", run))
        for module in (sparse_mla, sparse_mla_fp8, shared_rows):
            patched.enter_context(patch.object(module, "device_of", lambda _: device))
        for module in (indexer, indexer_paged):
            patched.enter_context(patch.object(module, "kernel_device", lambda _: device))
        patched.enter_context(patch.object(topk, "INTERPRETER", device))
        # The inputs stay on the CPU.
        patched.enter_context(patch.object(arguments, "triton_interpreted", lambda: True))
        yield forms


def new_forms(forms: Forms, call: Callable[..., Any], *arguments: Any) -> dict[str, int]:
    """How many forms of each kernel a call adds; kernels without a new one are left out."""
    before = {name: len(known) for name, known in forms.items()}
    call(*arguments)
    added = {name: len(known) - before.get(name, 0) for name, known in forms.items()}
    return {name: count for name, count in added.items() if count}
