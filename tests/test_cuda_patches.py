"""Layer 4 on CUDA without a GPU: each patch is still needed, and does what it says.

That the list of backends needs the patch, and what it changes, test_selection shows.
"""

import pytest
from pretended import run_pretended


def test_fp8_means_ds_mla_for_our_backend_only_with_the_patch():
    code = """
from types import SimpleNamespace
from vllm.model_executor.layers.attention import mla_attention
def canonical(backend, dtype):
    named = SimpleNamespace(get_name=lambda: backend)
    return mla_attention._canonicalize_sparse_mla_kv_cache_dtype(named, dtype)
asked = [("TRITON_MLA_SPARSE", "fp8"), ("TRITON_MLA_SPARSE", "fp8_e4m3"),
         ("TRITON_MLA_SPARSE", "bfloat16"), ("FLASHINFER_MLA_SPARSE", "fp8"),
         ("FLASHMLA_SPARSE", "fp8")]
before = [canonical(*a) for a in asked]
cuda_patches.read_fp8_as_ds_mla(); cuda_patches.read_fp8_as_ds_mla()
print(json.dumps([before, [canonical(*a) for a in asked]]))
"""
    before, after = run_pretended((12, 0), code)
    assert before == ["fp8", "fp8_e4m3", "bfloat16", "fp8", "fp8_ds_mla"]
    assert after == ["fp8_ds_mla", "fp8_ds_mla", "bfloat16", "fp8", "fp8_ds_mla"]


@pytest.mark.slow
def test_the_choice_is_explained_where_ours_is_the_first():
    code = """
import logging
import vllm.logger
from vllm.logger import init_logger
vllm.logger._should_log_with_scope = lambda scope: True  # there are no ranks here
lines = []
class Keep(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
init_logger("vllm.glm5lab").addHandler(Keep())
init_logger("vllm.glm5lab").setLevel("INFO")
patches.register_backend()
cuda_patches.offer_on_cuda(); cuda_patches.explain_choice(); cuda_patches.explain_choice()
from vllm.platforms import current_platform
with pretend_cuda.sparse_model():
    for dtype in DTYPES:
        pretend_cuda.ask(type(current_platform), dtype)
print(json.dumps(lines))
"""
    lines = run_pretended((9, 0), code.replace("DTYPES", "('fp8', 'bfloat16')"))
    assert lines == []
    (line,) = run_pretended((8, 9), code.replace("DTYPES", "['bfloat16']"))
    assert line.startswith("TRITON_MLA_SPARSE for SM89, cache bfloat16: no backend of vLLM's")
    assert "FLASHMLA_SPARSE: compute capability not supported" in line


SCORING = """
import ast, inspect
from pathlib import Path
import vllm
from vllm import _custom_ops
from vllm.model_executor.layers import sparse_attn_indexer
from vllm.v1.attention.backends.mla import indexer
from glm5lab.vllm_plugin import indexer_cuda
op = inspect.unwrap(sparse_attn_indexer.sparse_attn_indexer)
# GLM-5's attention on CUDA calls the op as a function; importing it needs compiled modules.
model = Path(vllm.__file__).parent / "models/deepseek_v32/attention.py"
imported = {(node.module, alias.name) for node in ast.walk(ast.parse(model.read_text()))
            if isinstance(node, ast.ImportFrom) for alias in node.names}
start = inspect.getsource(sparse_attn_indexer.SparseAttnIndexer.__init__)
cuda_patches.score_with_triton(); cuda_patches.score_with_triton()
def ours(owner, name, function):
    return getattr(owner, name) is function
print(json.dumps({
    "one module": op.__globals__ is vars(sparse_attn_indexer),
    "the model's": (sparse_attn_indexer.__name__, "sparse_attn_indexer") in imported,
    "needed": "not has_deep_gemm()" in start and "raise RuntimeError" in start,
    "called": [name in op.__code__.co_names for name in (
        "fp8_fp4_mqa_logits", "fp8_fp4_paged_mqa_logits", "get_indexer_topk",
        "top_k_per_row_prefill")],
    "replaced": [
        ours(sparse_attn_indexer, "fp8_fp4_mqa_logits", indexer_cuda.prompt_logits),
        ours(sparse_attn_indexer, "fp8_fp4_paged_mqa_logits", indexer_cuda.decode_logits),
        ours(sparse_attn_indexer, "get_indexer_topk", indexer_cuda.decode_top_k),
        ours(_custom_ops, "top_k_per_row_prefill", indexer_cuda.prompt_top_k),
    ],
    "plans for DeepGEMM": bool(indexer.has_deep_gemm()),
    "op starts": bool(sparse_attn_indexer.has_deep_gemm()),
    "reason": indexer_cuda.why_triton(),
}))
"""


@pytest.mark.parametrize(
    ("capability", "env", "reason"),
    [
        ((8, 9), {}, "DeepGEMM has no kernels for SM89"),
        ((9, 0), {"GLM5LAB_INDEXER": "triton"}, "GLM5LAB_INDEXER=triton"),
    ],
)
def test_the_indexer_scores_with_triton_where_deep_gemm_does_not_run(capability, env, reason):
    found = run_pretended(capability, SCORING, **env)
    assert found["reason"] == reason
    assert found["one module"]
    assert found["the model's"]
    assert found["needed"]
    assert all(found["called"])
    assert all(found["replaced"])
    assert not found["plans for DeepGEMM"]
    assert found["op starts"]


def test_the_indexer_is_left_alone_where_deep_gemm_is_asked_for():
    found = run_pretended((9, 0), SCORING, GLM5LAB_INDEXER="deepgemm")
    assert found["reason"] is None
    assert not any(found["replaced"])


@pytest.mark.parametrize(
    ("capability", "value", "message"),
    [
        ((10, 0), "triton", "GLM5LAB_INDEXER=triton: on data-center Blackwells"),
        ((9, 0), "fast", "GLM5LAB_INDEXER: expected auto, triton or deepgemm, got 'fast'"),
    ],
)
def test_an_indexer_that_cannot_be_is_refused(capability, value, message):
    code = """
from glm5lab.vllm_plugin import indexer_cuda
try:
    indexer_cuda.why_triton()
except ValueError as error:
    print(json.dumps(str(error)))
"""
    assert message in run_pretended(capability, code, GLM5LAB_INDEXER=value)


def test_kernels_are_warmed_up_after_vllms_own():
    """The worker's module needs compiled ones: its source is read, and a stub takes its place."""
    code = """
import types
from pathlib import Path
import vllm.v1.worker
from vllm.v1.attention.backend import AttentionBackend
source = (Path(vllm.v1.worker.__file__).parent / "gpu_worker.py").read_text()
calls = []
worker = types.ModuleType("vllm.v1.worker.gpu_worker")
worker.kernel_warmup = lambda worker: calls.append("vllm")
ours = types.ModuleType("glm5lab.vllm_plugin.warmup")
ours.warm_up = lambda config: calls.append(config)
for stub in (worker, ours):
    sys.modules[stub.__name__] = stub
vllm.v1.worker.gpu_worker = worker
cuda_patches.warm_up_before_ready(); cuda_patches.warm_up_before_ready()
worker.kernel_warmup(types.SimpleNamespace(vllm_config="ours"))
print(json.dumps(["import kernel_warmup" in source and "kernel_warmup(self)" in source, calls,
                  [name for name in dir(AttentionBackend) if "warm" in name]]))
"""
    called, calls, hooks = run_pretended((12, 0), code)
    assert called
    assert calls == ["vllm", "ours"]
    assert hooks == []  # with a hook of vLLM's own the patch may go


@pytest.mark.parametrize(("capability", "expected"), [((8, 6), True), ((8, 9), False)])
def test_gpus_before_ada_do_without_e4m3_conversions(capability, expected):
    """The model's module needs compiled ones: sources are read, and a stub takes its place."""
    code = """
import types
from pathlib import Path
import vllm
from vllm.v1.attention.backends.mla import indexer
folder = Path(vllm.__file__).parent / "models/deepseek_v32"
model, kernels = (folder / "attention.py").read_text(), (folder / "common/kernels.py").read_text()
package = types.ModuleType("vllm.models.deepseek_v32")
package.attention = types.ModuleType("vllm.models.deepseek_v32.attention")
package.attention.fused_norm_rope = package.attention.fused_q = lambda: None
for stub in (package, package.attention):
    sys.modules[stub.__name__] = stub
cuda_patches.do_without_e4m3_conversions(); cuda_patches.do_without_e4m3_conversions()
from glm5lab.vllm_plugin import ampere
print(json.dumps({
    "needed": "import fused_norm_rope, fused_q" in model and "tl.float8e4nv" in kernels,
    "replaced": [package.attention.fused_norm_rope is ampere.norm_rope,
                 package.attention.fused_q is ampere.query,
                 not indexer._supports_native_decode(2)],
}))
"""
    found = run_pretended(capability, code)
    assert found["needed"]
    assert found["replaced"] == [expected] * 3


def test_what_the_backend_takes_and_what_it_refuses():
    code = """
import torch
from vllm.platforms import current_platform
patches.register_backend(); cuda_patches.offer_on_cuda()
cases = [{"head_size": 512}, {"use_dcp": True}, {"block_size": 48}, {"dtype": torch.float16},
         {"head_size": 192}, {"use_pcp": True}, {"has_sink": True}, {"dtype": torch.float32},
         {"use_sparse": False}]
with pretend_cuda.sparse_model():
    rows = [pretend_cuda.ask(type(current_platform), "auto", **case) for case in cases]
print(json.dumps(["TRITON_MLA_SPARSE" in row["valid"] for row in rows]))
"""
    assert run_pretended((12, 0), code) == [True] * 4 + [False] * 5


@pytest.mark.parametrize(
    ("capability", "native"), [((9, 0), "FLASH_ATTN_MLA_SPARSE"), ((12, 0), None), ((8, 9), None)]
)
def test_rows_without_a_rotary_part_keep_their_native_backend(capability, native):
    """GLM-5.3-Flash's rows of 512: ours is offered behind what vLLM has, and serves elsewhere."""
    code = """
from vllm.platforms import current_platform
pretend_cuda.pretend_flashinfer(False)
with pretend_cuda.sparse_model():
    before = pretend_cuda.ask(type(current_platform), "bfloat16", head_size=512)
    patches.register_backend(); cuda_patches.offer_on_cuda()
    after = pretend_cuda.ask(type(current_platform), "bfloat16", head_size=512)
print(json.dumps([before["chosen"], after["chosen"], after["valid"]]))
"""
    before, after, valid = run_pretended(capability, code)
    assert before == native
    assert after == (native or "TRITON_MLA_SPARSE")
    assert valid[-1] == "TRITON_MLA_SPARSE"
