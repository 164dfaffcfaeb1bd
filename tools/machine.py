"""What this machine offers to set-up: GPU, Python, system packages. Standard library only."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

SUPPORTED = ((3, 11), (3, 12), (3, 13))
# First choice first: the CPU list was frozen on 3.11, the GPU list is resolved for 3.12.
PREFERRED = {"cpu": ((3, 11), (3, 12), (3, 13)), "gpu": ((3, 12), (3, 11), (3, 13))}


class SetupError(Exception):
    """Set-up cannot go on; the message names the cause and the fix."""


@dataclass(frozen=True)
class Python:
    """An interpreter that was run: its path, (major, minor), and what it lacks for set-up."""

    path: str
    version: tuple[int, int]
    has_venv: bool
    has_headers: bool


def environment_kind() -> str:
    """Either "gpu" or "cpu": GLM5LAB_ENV where set, otherwise whether there is an NVIDIA GPU."""
    wanted = os.environ.get("GLM5LAB_ENV", "")
    if wanted not in ("", "gpu", "cpu"):
        raise SetupError(f"GLM5LAB_ENV={wanted}: unknown; set it to gpu or cpu")
    return wanted or ("gpu" if has_gpu() else "cpu")


def has_gpu() -> bool:
    """Whether the driver shows a GPU; nvidia-smi is asked where there are no device nodes (WSL)."""
    if any(Path("/dev").glob("nvidia[0-9]*")) or any(Path("/proc/driver/nvidia/gpus").glob("*")):
        return True
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return False
    try:
        listed = subprocess.run(
            [smi, "-L"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU 0" in listed.stdout


def check_platform() -> None:
    """Raise SetupError on a system for which no engine wheel exists."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        raise SetupError(
            f"{platform.system()} on {platform.machine()}: vLLM's wheels are for Linux on x86-64 "
            "and aarch64; use such a machine, a container or WSL"
        )


def choose_python(kind: str) -> Python:
    """The first Python that runs, in this order: GLM5LAB_PYTHON, the preferred versions, our own.

    Raises:
        SetupError: none of a supported version runs, or it cannot create a virtual environment.
    """
    override = os.environ.get("GLM5LAB_PYTHON")
    found = _probe(override) if override else _find(kind)
    if found is None or found.version not in SUPPORTED:
        wanted = " or ".join(f"{major}.{minor}" for major, minor in SUPPORTED)
        what = f"GLM5LAB_PYTHON={override} is not" if override else "there is no"
        name = "python{}.{}".format(*PREFERRED[kind][0])
        raise SetupError(
            f"{what} Python {wanted} that runs; install one with\n"
            f"    {install_command(name + ' ' + name + '-venv', name)}\n"
            "or point GLM5LAB_PYTHON at one (conda, pyenv and uv provide them too)"
        )
    if not found.has_venv:
        name = "python{}.{}".format(*found.version)
        raise SetupError(
            f"{found.path} cannot create virtual environments (no ensurepip); install it with\n"
            f"    {install_command(name + '-venv', name + '-libs')}"
        )
    return found


def _find(kind: str) -> Python | None:
    """A Python with venv in order of preference, else the first one without it."""
    lacking: Python | None = None
    for version in PREFERRED[kind]:
        for folder in os.get_exec_path():
            candidate = _probe(os.path.join(folder, "python{}.{}".format(*version)))
            if candidate is None or candidate.version != version:
                continue
            if candidate.has_venv:
                return candidate
            lacking = lacking or candidate
    own = _probe(sys.executable)
    if own is not None and own.version in SUPPORTED and own.has_venv:
        return own
    return lacking


def _probe(path: str) -> Python | None:
    """Run it: a file of that name may be a shim whose Python is not installed."""
    code = (
        "import sys, os, sysconfig, importlib.util as u; "
        "print(*sys.version_info[:2], int(bool(u.find_spec('ensurepip') and u.find_spec('venv'))), "
        "int(os.path.exists(os.path.join(sysconfig.get_paths()['include'], 'Python.h'))))"
    )
    if not os.access(path, os.X_OK) and shutil.which(path) is None:
        return None
    try:
        answer = subprocess.run(
            [path, "-c", code], capture_output=True, text=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    if answer.returncode != 0:
        return None
    major, minor, venv, headers = (int(word) for word in answer.stdout.split())
    return Python(path, (major, minor), bool(venv), bool(headers))


def install_command(debian: str, fedora: str) -> str:
    """The command that installs a system package here."""
    sudo = "" if os.geteuid() == 0 else "sudo "
    if shutil.which("dnf"):
        return f"{sudo}dnf install {fedora}"
    return f"{sudo}apt-get install {debian}"


def missing_packages(kind: str, python: Python) -> list[str]:
    """One line for each missing system package: what needs it, and the command that installs it."""
    lines: list[str] = []

    def need(present: bool, what: str, why: str, debian: str, fedora: str) -> None:
        if not present:
            lines.append(f"{what} is missing ({why}): {install_command(debian, fedora)}")

    need(
        _has_library("libgomp.so.1"),
        "libgomp",
        "llama.cpp, the referee, uses it",
        "libgomp1",
        "libgomp",
    )
    if kind == "cpu":
        need(
            _has_library("libnuma.so.1"),
            "libnuma",
            "vLLM's CPU kernels use it",
            "libnuma1",
            "numactl-libs",
        )
        return lines
    name = "python{}.{}".format(*python.version)
    compiler = bool(os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"))
    need(compiler, "A C compiler", "Triton builds its launchers with it", "gcc", "gcc")
    need(
        python.has_headers,
        "Python.h",
        "Triton builds its launchers against it",
        name + "-dev",
        name + "-devel",
    )
    return lines


def _has_library(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
