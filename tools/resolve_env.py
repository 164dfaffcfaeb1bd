"""Resolve a list of pins for another Python and platform without installing anything.

    .venv/bin/python -m tools.resolve_env

prints what environment.yml and glm5lab's dependencies come to on Python 3.12 and x86-64 Linux.
pip reads package metadata only, which takes about a minute.
"""

import json
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

from tools.environment_file import normalize, read

ROOT = Path(__file__).resolve().parent.parent
GLIBC = range(17, 40)  # manylinux_2_17 to manylinux_2_39, what a current distribution accepts

# pip takes tags from --python-version and --platform, but evaluates environment markers (such as
# python_version > "3.11") for the Python it runs on. This puts the target's values in their place.
PIP_FOR_TARGET = """
import sys
import pip._vendor.packaging.markers as markers
here = markers.default_environment()
target = dict(
    here, python_version={version!r}, python_full_version={version!r} + ".0",
    implementation_version={version!r} + ".0", platform_machine="x86_64",
    platform_system="Linux", sys_platform="linux", os_name="posix",
)
markers.default_environment = lambda: dict(target)
from pip._internal.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


class ResolutionError(Exception):
    """The pins cannot be met together; the message is what pip says about it."""


def resolve(requirements: Sequence[str], python: str = "3.12") -> dict[str, str]:
    """The versions that the requirements come to on x86-64 Linux.

    Args:
        requirements: lines as pip reads them.
        python: the target's version, such as "3.12".

    Returns:
        Normalized name -> version, of everything that would be installed.

    Raises:
        ResolutionError: they conflict, or one of them does not exist for the target.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        wanted = Path(folder, "requirements.txt")
        wanted.write_text("\n".join(requirements) + "\n")
        command = [
            *(sys.executable, "-c", PIP_FOR_TARGET.format(version=python)),
            *("install", "--dry-run", "--ignore-installed", "--quiet", "--no-input"),
            *("--disable-pip-version-check", "--report", str(report), "--target", folder),
            *("--only-binary", ":all:", "--python-version", python, "--implementation", "cp"),
            *("--abi", "cp" + python.replace(".", ""), "--abi", "abi3", "--abi", "none"),
            *_platforms(),
            *("-r", str(wanted)),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise ResolutionError(done.stderr.strip() or done.stdout.strip())
        installed = json.loads(report.read_text())["install"]
    found = [item["metadata"] for item in installed]
    return {normalize(item["name"]): item["version"] for item in found}


def _platforms() -> list[str]:
    names = [f"manylinux_2_{minor}_x86_64" for minor in reversed(GLIBC)]
    names += ["manylinux2014_x86_64", "manylinux2010_x86_64", "manylinux1_x86_64", "linux_x86_64"]
    return [word for name in names for word in ("--platform", name)]


def gpu_requirements() -> list[str]:
    """The pip section of environment.yml, and what pyproject.toml asks for (its `-e .` line)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = [requirement.text for requirement in read(ROOT / "environment.yml").requirements]
    return [*pins, *project["dependencies"]]


if __name__ == "__main__":
    for name, version in sorted(resolve(gpu_requirements()).items()):
        print(f"{name}=={version}")
