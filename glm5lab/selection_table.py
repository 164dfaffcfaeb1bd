"""Layer 0: which attention backend vLLM takes for GLM-5, on a device that need not be here.

vLLM's own selection answers, in a process that pretends to have the device; see
`vllm_plugin.pretend_cuda`.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from glm5lab.env import child_environment
from glm5lab.errors import Glm5labError, InputError

Table = dict[str, dict[str, dict[str, dict[str, Any]]]]
CAPABILITY = re.compile(r"\d{1,2}\.\d")
TIMEOUT_S = 300


def present_capabilities(facts: dict[str, Any]) -> list[str]:
    """The capabilities of the GPUs in a report of `env`, where vLLM uses them; each once."""
    if facts["platform"] != "cuda":
        return []
    found = [f"{major}.{minor}" for major, minor in (gpu["capability"] for gpu in facts["gpus"])]
    return sorted(set(found))


def selection(capabilities: Sequence[str]) -> Table:
    """Capability -> "with flashinfer" or "without flashinfer" -> cache dtype -> what vLLM takes.

    The last is a dict: chosen (a backend or None), native (the choice without glm5lab), valid, and
    refused (backend -> reasons).

    Args:
        capabilities: such as "12.0".

    Raises:
        InputError: a capability is none.
        Glm5labError: vLLM is missing or does not answer.
    """
    for capability in capabilities:
        if not CAPABILITY.fullmatch(capability):
            cause = f"expected MAJOR.MINOR such as 12.0, got {capability!r}"
            raise InputError("capability", cause, "nvidia-smi --query-gpu=compute_cap prints it")
    command = [sys.executable, "-m", "glm5lab.vllm_plugin.pretend_cuda", *capabilities]
    child = subprocess.run(
        command,
        env=child_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    lines = child.stdout.strip().splitlines()
    if child.returncode or not lines:
        last = (child.stderr.strip().splitlines() or ["no message"])[-1]
        raise Glm5labError(f"vLLM's selection could not be asked: {last}; `glm5lab env` says more")
    return json.loads(lines[-1])
