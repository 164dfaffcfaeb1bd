"""What stock tools say about the same file and machine, asked for real: each notebook begins so.

Nothing of glm5lab takes part: vLLM is asked in a process that loads no plugins.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from glm5lab.env import child_environment

# vLLM's platform is asked what the engine would ask it for GLM-5's attention.
ASK_ATTENTION = """
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.selector import AttentionSelectorConfig
wanted = AttentionSelectorConfig(
    head_size=576, dtype=torch.bfloat16, kv_cache_dtype="auto", block_size=None,
    use_mla=True, use_sparse=True)
try:
    print("answer:", current_platform.get_attn_backend_cls(None, wanted))
except Exception as error:
    print("answer:", type(error).__name__ + ":", " ".join(str(error).split()))
"""
TIMEOUT_S = 300


def stock_attention() -> str:
    """The sparse attention that stock vLLM takes on this machine, or the words of its refusal."""
    environment = {**child_environment(), "VLLM_PLUGINS": ""}
    child = subprocess.run(
        [sys.executable, "-c", ASK_ATTENTION],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=TIMEOUT_S,
    )
    answers = [line for line in child.stdout.splitlines() if line.startswith("answer: ")]
    if answers:
        return answers[-1].removeprefix("answer: ")
    return (child.stderr.strip().splitlines() or ["no answer"])[-1]


def stock_tensors(shard: Path) -> int:
    """How many tensors gguf-py's reader finds in the file that one names."""
    from gguf import GGUFReader

    return len(GGUFReader(shard).tensors)


def stock_config(shard: Path) -> str:
    """What transformers makes of the file, or the words of its refusal."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(shard.parent, gguf_file=shard.name)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return type(config).__name__


def stock_names(hf_names: Iterable[str], layers: int) -> dict[str, str | None]:
    """HF tensor -> the GGUF name that gguf-py's map gives it, None where it knows none.

    Args:
        hf_names: names of an HF checkpoint.
        layers: the model's blocks.
    """
    import gguf

    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GLM_DSA, layers)
    suffixes = (".weight", ".bias")
    return {name: table.get_name(name, try_suffixes=suffixes) for name in hf_names}
