"""Compile every tile that the kernels can get, for GLM-5: any architecture, no GPU needed.

In the forms that serving launches and in some others; each module's `compilations` says which.
Triton compiles for a named target; the machine code's registers and stack are read with the
`cuobjdump` that Triton's package carries. Compiling does not fail where shared memory or registers
exceed the device's, so they are compared here.
"""

import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from glm5lab.attention.tiles import Device, Tile, shared_memory_of
from glm5lab.errors import Glm5labError

ARCHITECTURES = (80, 86, 89, 90, 100, 120, 121)
REGISTERS = 65_536  # of a multiprocessor, on all of these
THREADS = re.compile(r"\.(?:req|max)ntid (\d+)")
MODULES = (
    "glm5lab.attention.sparse_mla_rows",
    "glm5lab.attention.sparse_mla_merge",
    "glm5lab.attention.sparse_mla_fp8",
    "glm5lab.attention.sparse_mla_hopper",
    "glm5lab.attention.sparse_mla_hopper_fp8",
    "glm5lab.attention.shared_rows",
    "glm5lab.attention.shared_rows_hopper",
    "glm5lab.attention.shared_rows_union",
    "glm5lab.attention.indexer",
    "glm5lab.attention.indexer_paged",
    "glm5lab.attention.kv_cache",
    "glm5lab.attention.topk",
)


@dataclass(frozen=True)
class Compilation:
    """One kernel with everything that decides about its machine code.

    Attributes:
        name: for the report.
        kernel: name of the Triton function in its module.
        types: Triton types of the arguments that are no int32 ("*bf16", "fp32").
        constants: values of the constexpr arguments.
        warps: warps a program.
        options: further compile options.
        declared: bytes of shared memory that its tile states; None for a kernel without tiles.
    """

    name: str
    kernel: str
    types: dict[str, str]
    constants: dict[str, Any]
    warps: int = 4
    options: dict[str, Any] = field(default_factory=dict)
    declared: int | None = None

    @classmethod
    def of_tile(
        cls, tile: Tile, name: str, kernel: str, types: dict[str, str], constants: dict[str, Any]
    ) -> "Compilation":
        """With the warps, the options and the bytes that a tile states."""
        return cls(name, kernel, types, constants, tile.warps, tile.options, tile.shared_memory)


@dataclass(frozen=True)
class Resources:
    """What one compiled kernel needs.

    Attributes:
        kernel: the compilation's name.
        architecture: such as "sm_120".
        shared_memory, limit: bytes a block, needed and there.
        registers: a thread.
        spilled: bytes of stack a thread: spilled registers, and frames of functions called.
        seconds: compile time.
        error: the compiler's last line; "" where it compiled.
        threads: a program, with those of Gluon's further partitions.
        cached: Triton's cache had it, so that nothing was compiled.
        declared: bytes of shared memory that its tile states, by which it is chosen; None for none.
    """

    kernel: str
    architecture: str
    shared_memory: int
    limit: int
    registers: int
    spilled: int
    seconds: float
    error: str = ""
    threads: int = 32
    cached: bool = False
    declared: int | None = None

    @property
    def fits(self) -> bool:
        """Whether it compiled and the device has the shared memory and the registers.

        And whether its tile states at least the shared memory that it takes.
        """
        fits = self.shared_memory <= self.limit and self.registers * self.threads <= REGISTERS
        return not self.error and fits and not self.understated

    @property
    def understated(self) -> bool:
        """Whether it takes more shared memory than its tile states."""
        return self.declared is not None and self.shared_memory > self.declared


def device_for(capability: int) -> Device:
    """A device of an architecture, with Hopper's number of multiprocessors."""
    if capability not in ARCHITECTURES:
        names = ", ".join(f"sm_{a}" for a in ARCHITECTURES)
        raise Glm5labError(f"arch: sm_{capability} is not among {names}; name one of them")
    return Device(capability, 132, shared_memory_of(capability))


def compile_all(capabilities: Sequence[int], jobs: int | None = None) -> Iterator[Resources]:
    """Compile what every module lists for each architecture, several at a time.

    Args:
        capabilities: such as (80, 120).
        jobs: processes; None for one a core.

    Yields:
        Resources in order of architecture and configuration.

    Raises:
        Glm5labError: an architecture that is not supported.
    """
    work = []
    for capability in capabilities:
        device = device_for(capability)
        for module in MODULES:
            work += [(module, capability, c) for c in _compilations(module, device)]
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(_compile, work)


def _compilations(module: str, device: Device) -> list[Compilation]:
    from importlib import import_module

    found: list[Compilation] = import_module(module).compilations(device)
    return found


def _compile(work: tuple[str, int, Compilation]) -> Resources:
    module, capability, c = work
    limit = device_for(capability).shared_memory
    start = time.perf_counter()
    try:
        shared, threads, cubin, cached = _machine_code(module, capability, c)
    except Exception as error:
        line = str(error).strip().splitlines()[-1][:200] if str(error).strip() else repr(error)
        seconds = time.perf_counter() - start
        return Resources(c.name, f"sm_{capability}", 0, limit, 0, 0, seconds, line)
    seconds = time.perf_counter() - start
    registers, spilled = resource_usage(cubin)
    return Resources(
        *(c.name, f"sm_{capability}", shared, limit, registers, spilled, seconds),
        threads=threads,
        cached=cached,
        declared=c.declared,
    )


def _machine_code(module: str, capability: int, c: Compilation) -> tuple[int, int, bytes, bool]:
    """Shared memory in bytes, threads a program, the cubin, and whether it was in the cache."""
    from importlib import import_module

    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    kernel = getattr(import_module(module), c.kernel)
    names = [p.name for p in kernel.params]
    signature = {n: "constexpr" if n in c.constants else c.types.get(n, "i32") for n in names}
    # As at a launch: pointers and the strides of q, kv and out are multiples of 16.
    aligned = [["tt.divisibility", 16]]
    attributes = {
        (p.num,): aligned
        for p in kernel.params
        if p.name not in c.constants
        and not (p.do_not_specialize or p.do_not_specialize_on_alignment)
        and (signature[p.name].startswith("*") or p.name.startswith("stride_"))
    }
    constants = {(names.index(n),): value for n, value in c.constants.items()}
    source = GluonASTSource if isinstance(kernel, GluonJITFunction) else ASTSource
    hits: list[bool] = []
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
        compiled = triton.compile(
            source(kernel, signature, constants, attributes),
            target=GPUTarget("cuda", capability, 32),
            options={"num_warps": c.warps, **c.options},
        )
    # With warps of further partitions, which num_warps leaves out.
    threads = int(THREADS.search(compiled.asm["ptx"])[1])  # type: ignore[index]
    return compiled.metadata.shared, threads, compiled.asm["cubin"], hits == [True]


@cache
def _cuobjdump() -> Path:
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    if not tool.is_file():
        raise Glm5labError(f"{tool} is missing: install Triton's own wheel, which carries it")
    return tool


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack a thread of a kernel's machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_cuobjdump()), "--dump-resource-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(part for part in text.splitlines() if "REG:" in part)
    values = dict(item.split(":", 1) for item in line.split() if ":" in item)
    return int(values["REG"]), int(values["STACK"])


def as_dict(resources: Resources) -> dict[str, Any]:
    """For JSON."""
    return {**asdict(resources), "seconds": round(resources.seconds, 2), "fits": resources.fits}
