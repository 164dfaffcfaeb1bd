"""GPU, driver and versions, as they stand in every file of figures."""

import subprocess
from datetime import date
from importlib import metadata
from typing import Any

PACKAGES = ("vllm", "torch", "triton")


def machine(command: str) -> dict[str, Any]:
    """What a measurement was made on, without initializing CUDA in this process."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, check=True).stdout
        gpu, _, driver = answer.strip().splitlines()[0].rpartition(", ")
    except (OSError, subprocess.CalledProcessError, IndexError):
        gpu, driver = "unknown", "unknown"
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        "command": command,
        "date": date.today().isoformat(),
        "gpu": gpu,
        "driver": driver,
        "versions": versions,
    }
