"""What a vLLM with vllm-gguf-plugin 0.0.5 alone does wrong with GLM-5, and the test of each here.

In the order in which one meets them. A test that is renamed or removed is missed here.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FAILURES = [
    ("an HF config.json has to lie beside the file", "test_loading", "prepare_writes_a_folder"),
    ("model_type glm_moe_dsa is unknown", "test_cuda_loading", "a_gpu_takes_blocks_without"),
    ("experts, k_b, v_b and the correction bias are dropped", "test_loading", "every_expected_ten"),
    ("and nothing checks that parameters were filled", "test_loading", "audit_names_what_is_wrong"),
    ("kv_b cannot be joined while quantized", "test_loader_ranks", "blocks_are_those_of_the_numb"),
    ("weights_proj becomes qweights_proj", "test_loading", "renames_act_on_whole_components"),
    ("wk with weights_proj is built plain", "test_cuda_loading", "a_gpu_takes_blocks_without"),
    ("wq_b's replicated parameter has size 0", "test_cuda_loading", "a_gpu_takes_blocks_without"),
    ("bf16 and quantized parts in one layer", "test_loader_ranks", "a_plain_part_beside_blocks"),
    ("gate and up experts of two types", "test_gguf_kernels", "a_layer_of_experts_takes_tokens"),
    ("indexers of shared layers: KeyError", "test_cuda_loading", "a_file_of_plain_numbers_is_le"),
    ("the prediction block is skipped", "test_loader_ranks", "multi_token_prediction_is_loaded"),
    ("on a GPU as well", "test_cuda_loading", "the_prediction_block_takes_blocks_too"),
    ("a first shard without tensors ties the embedding", "test_gguf_config", "tying_and_vocabular"),
    ("a missing shard goes unnoticed", "test_gguf_split", "missing_shards_are_named"),
    ("every rank loads rank 0's share", "test_loader_ranks", "a_rank_that_takes_rank_0s_share"),
    ("row slices cut blocks in two", "test_loader_ranks", "borders_inside_blocks"),
    ("IQ3_S is read through an old table", "test_gguf_kernels", "which_kernel_a_product_calls"),
    ("fields that vLLM reads are in no file", "test_gguf_config", "equals_the_twin"),
    ("experts of other ranks are read beyond the stack", "test_gguf_kernels", "which_kernel_exper"),
    ("stacks above 2 GiB wrap around", "test_gguf_kernels", "which_kernel_experts_call"),
    ("more than 65,535 pairs of token and expert", "test_gguf_kernels", "a_layer_of_experts_takes"),
]


@cache
def functions(module: str) -> tuple[str, ...]:
    """Names of the test functions of a module, without `test_`."""
    tree = ast.parse((TESTS / f"{module}.py").read_text(encoding="utf-8"))
    found = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    return tuple(name.removeprefix("test_") for name in found if name.startswith("test_"))


@pytest.mark.parametrize(
    ("module", "beginning"), [row[1:] for row in FAILURES], ids=[row[0] for row in FAILURES]
)
def test_each_failure_has_its_test(module, beginning):
    assert sum(name.startswith(beginning) for name in functions(module)) == 1
