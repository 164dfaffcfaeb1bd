"""Code in a child where vLLM believes to be on a CUDA device that is not there."""

import json
import os
import subprocess
import sys

SET_UP = """
import json, sys
from glm5lab.vllm_plugin import pretend_cuda
pretend_cuda.stand_in_for_compiled_modules()
sys.modules["vllm.v1.attention.backends.mla.cutlass_mla"] = None
pretend_cuda.pretend({capability})
from glm5lab.vllm_plugin import cuda_patches, patches
"""


def run_pretended(capability, code, **env):
    """The JSON that the code prints last; it may use json, cuda_patches and patches."""
    return printed_last(["-c", SET_UP.format(capability=capability) + code], **env)


def printed_last(arguments, **env):
    """The JSON that a Python child prints last."""
    child = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | env,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.strip().splitlines()[-1])
