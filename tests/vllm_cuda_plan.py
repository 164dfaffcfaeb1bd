"""What one rank of vLLM's CUDA model would load, on a machine without a GPU.

    python vllm_cuda_plan.py FILE TP RANK EXPERT_PARALLEL OPTIONS

OPTIONS are EngineArgs as JSON, and "draft". The model has no memory behind it; every copy that the
loader would make is marked in the audit without being made. Prints one line of JSON: quantization,
class, quantization methods by layer, what the audit says, bytes of parameters, boxes.
"""

import json
import os
import sys
from collections import Counter
from typing import Any

from glm5lab.vllm_plugin import pretend_cuda

# What vLLM's layers ask of its compiled modules while they are built: what is supported (nothing
# is), and functions that are never called here.
ASKED = (
    *("cutlass_scaled_mm_supports_fp8", "cutlass_scaled_mm_supports_block_fp8"),
    *("cutlass_group_gemm_supported", "cutlass_scaled_mm_supports_fp4"),
    *("silu_and_mul", "rms_norm", "fused_add_rms_norm", "rotary_embedding"),
)


def stand_in_for_operations() -> None:
    """Let the compiled modules that are not there have these."""
    import torch

    for name in ASKED:
        if not hasattr(torch.ops._C, name):
            setattr(torch.ops._C, name, lambda *_: False)


def keep_expert_maps() -> None:
    """Which experts are here is a tensor that the loader reads: it needs memory."""
    import torch
    from vllm.model_executor.layers.fused_moe import expert_map_manager

    original = expert_map_manager.determine_expert_map

    def determine_expert_map(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return original(*args, **kwargs)

    expert_map_manager.determine_expert_map = determine_expert_map


def plan(file: str, *numbers: str, options: dict[str, Any]) -> dict[str, Any]:
    """Build, plan, audit."""
    import vllm_rank

    from glm5lab.gguf.config import hf_config
    from glm5lab.gguf.reader import open_gguf
    from glm5lab.loading.audit import Audit
    from glm5lab.loading.destinations import copies
    from glm5lab.loading.loader import under_first_names
    from glm5lab.loading.mtp import mtp_mappings
    from glm5lab.loading.reconcile import require_complete

    keep_expert_maps()
    tp, rank, expert_parallel = map(int, numbers)
    draft = options.pop("draft", False)
    if draft:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
    model, config = vllm_rank.build(
        file, tp, 1, rank, bool(expert_parallel), draft=draft, dtype="bfloat16", **options
    )
    gguf = open_gguf(file)
    mappings = (
        mtp_mappings(gguf, hf_config(gguf))
        if draft
        else require_complete(gguf, hf_config(gguf)).mappings
    )
    loaded = [m for m in mappings if not m.dropped]
    parameters: dict[str, Any] = dict(model.named_parameters())
    padded = [
        n for n, p in parameters.items() if n.endswith(("embed_tokens.weight", "head.weight"))
    ]
    audit = Audit({name: tuple(p.shape) for name, p in parameters.items()}, padded)
    for copy in under_first_names(copies(model, gguf, loaded), model, parameters):
        audit.filled(copy)
    methods = Counter(
        f"{type(m).__name__}: {type(m.quant_method).__name__}"
        for m in model.modules()
        if hasattr(m, "quant_method")
    )
    return {
        "quantization": config.model_config.quantization,
        "class": f"{type(model).__module__}.{type(model).__name__}",
        "methods": methods,
        "problems": audit.problems(),
        "sizes": {name: p.numel() * p.element_size() for name, p in parameters.items()},
        "boxes": audit.boxes(),
        "tensors": [m.gguf for m in loaded],
    }


if __name__ == "__main__":
    pretend_cuda.stand_in_for_compiled_modules()
    pretend_cuda.pretend((9, 0)).device_type = "meta"  # where buffers are made
    stand_in_for_operations()
    os.environ["VLLM_DISABLE_SHARED_EXPERTS_STREAM"] = "1"
    *arguments, text = sys.argv[1:]
    print("PLAN", json.dumps(plan(*arguments, options=json.loads(text))), flush=True)
