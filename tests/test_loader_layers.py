"""Layer 4: what a dense layer and a layer of experts say once they are loaded, beside float64.

On a GPU at GLM-5's real sizes (256 experts of 6144 x 2048), on a CPU at small ones.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from children import printed

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "GLM5LAB_INDEXER": "triton",
}
CHILD = Path(__file__).parent / "real_layers.py"
SMALL = {
    **{"hidden_size": 256, "num_attention_heads": 4, "q_lora_rank": 256, "n_routed_experts": 32},
    **{"num_experts_per_tok": 3, "moe_intermediate_size": 512, "intermediate_size": 1024},
    **{"index_n_heads": 16, "index_topk": 16},
}
# Few tokens a batch: the buffer for their top-k would count as much as a layer.
ENGINE = {
    **{"enforce_eager": True, "max_model_len": 64, "max_num_seqs": 1},
    **{"max_num_batched_tokens": 256},
}
MIB = 1 << 20
# Two products behind each other, each of which rounds activations to 8 bits: 1e-2 for each.
TWO_PRODUCTS = 2e-2
LARGEST = 256 * 6144 * 2048 // 256 * 210  # the stack of down projections, in Q6_K


def figures(folder: Path, sizes: dict[str, int], **options: Any) -> dict[str, Any]:
    """What `real_layers.py` prints."""
    arguments = [CHILD, folder, json.dumps(sizes), json.dumps(ENGINE | options)]
    found, _ = printed("FIGURES", arguments, SETTINGS)
    print("FIGURES", json.dumps(found))
    return found


@pytest.mark.slow
def test_small_layers_on_a_cpu(tmp_path):
    found = figures(
        tmp_path,
        SMALL,
        dtype="float32",
        quantization="glm5lab",
        kv_cache_memory_bytes=64 * MIB,
    )
    assert max(found["errors"].values()) < 1e-5
    assert len(found["errors"]) == 4


@pytest.mark.gpu
def test_real_layers_on_gpus(tmp_path):
    """Outputs, memory of GPU and host beside the plan; two ranks read half of the file each."""
    import torch

    options = {
        **{"dtype": "bfloat16", "attention_backend": "TRITON_MLA_SPARSE"},
        **{"kv_cache_memory_bytes": 64 * MIB, "gpu_memory_utilization": 0.3},
    }
    one = figures(tmp_path, {}, **options)
    assert max(one["errors"].values()) < TWO_PRODUCTS
    assert one["parameter_bytes"] == [one["planned_bytes"]]
    assert one["gpu_bytes"] == pytest.approx(one["planned_bytes"], rel=0.01)
    assert one["host_bytes"] < LARGEST + (2 << 30)
    if torch.cuda.device_count() > 1:
        two = figures(tmp_path, {}, tensor_parallel_size=2, **options)
        assert len(two["bytes_read"]) == 2
        assert max(two["bytes_read"]) <= 0.55 * two["file_bytes"]
        assert two["parameter_bytes"] == [two["planned_bytes"]] * 2
