"""Layer 4: registration, selection and engine features, in processes of their own.

vLLM keeps global state (platform, plugins, registries), so each test that needs a fresh one runs
a child.
"""

import json
import os
import subprocess
import sys

import pytest

# One engine in this process: bit-stable and without worker processes.
IN_PROCESS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}

ENGINE = """
import json, sys
from vllm import LLM, SamplingParams
llm = LLM(model=sys.argv[1], dtype="float32", enforce_eager=True, max_model_len=256,
          max_num_seqs=4, **json.loads(sys.argv[2]))
def ask(*prompts, **kwargs):
    prompts = [{"prompt_token_ids": list(p)} for p in prompts]
    return llm.generate(prompts, SamplingParams(temperature=0, **kwargs), use_tqdm=False)
"""


def run_child(code, *arguments, env=None, timeout=300):
    """Run Python code in a child; returns its last line of output parsed as JSON, and its log."""
    child = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env={**os.environ, **IN_PROCESS, **(env or {})},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    log = child.stdout + child.stderr
    assert child.returncode == 0, log[-4000:]
    return json.loads(child.stdout.strip().splitlines()[-1]), log


def test_importing_the_plugin_loads_nothing_heavy():
    code = "import sys, json, glm5lab, glm5lab.vllm_plugin; print(json.dumps(sorted(sys.modules)))"
    modules, _ = run_child(code)
    assert not {"torch", "vllm", "transformers", "pandas", "numpy"} & set(modules)


def test_registering_twice_is_harmless():
    code = """
import json
from glm5lab import vllm_plugin
from glm5lab.vllm_plugin import patches
vllm_plugin.register(); vllm_plugin.register(); patches.apply()
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.registry import AttentionBackendEnum as E
print(json.dumps([E.TRITON_MLA_SPARSE.get_class().get_name(),
                  hasattr(EngineArgs.create_engine_config._glm5lab_original, "_glm5lab_original")]))
"""
    (name, wrapped_twice), log = run_child(code)
    assert name == "TRITON_MLA_SPARSE"
    assert not wrapped_twice
    assert "overwritten" not in log


def test_a_part_that_fails_leaves_the_others_and_other_models_alone():
    code = """
from glm5lab.vllm_plugin import patches
def broken(): raise AttributeError("moved")
broken.__name__ = "register_loader"
patches.register_loader = broken
patches.apply()
from vllm.v1.attention.backends.registry import AttentionBackendEnum
assert "TRITON_MLA_SPARSE" in AttentionBackendEnum.__members__
"""
    child = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr[-2000:]
    said = child.stdout + child.stderr
    assert "glm5lab: register_loader does not work with this vLLM (AttributeError: moved)" in said


@pytest.mark.slow
def test_the_backend_survives_pickling_into_a_process_without_plugins():
    pickle_it = """
import base64, json, pickle
from glm5lab import vllm_plugin
vllm_plugin.register()
from vllm.v1.attention.backends.registry import AttentionBackendEnum as E
pickled = [pickle.dumps(m) for m in (E.TRITON_MLA_SPARSE, E.TRITON_MLA)]
print(json.dumps([base64.b64encode(p).decode() for p in pickled]))
"""
    unpickle_it = """
import base64, json, pickle, sys
print(json.dumps([pickle.loads(base64.b64decode(p)).name for p in json.loads(sys.argv[1])]))
"""
    pickled, _ = run_child(pickle_it)
    names, _ = run_child(unpickle_it, json.dumps(pickled))
    assert names == ["TRITON_MLA_SPARSE", "TRITON_MLA"]


@pytest.mark.parametrize("target", [None, pytest.param("cpu", marks=pytest.mark.slow)])
def test_the_cpu_platform_is_ours_however_vllm_finds_it(target):
    code = """
import json
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.platforms import current_platform
print(json.dumps(type(current_platform).__name__))
"""
    platform, _ = run_child(code, env={"VLLM_TARGET_DEVICE": target} if target else None)
    assert platform == "Glm5CpuPlatform"


def test_the_cpu_build_answers_to_the_name_vllm():
    code = """
import importlib.metadata, json
from glm5lab.vllm_plugin import platform
print(json.dumps([platform(), platform(), importlib.metadata.version("vllm")]))
"""
    (first, second, version), _ = run_child(code)
    assert first == second == "glm5lab.vllm_plugin.cpu.Glm5CpuPlatform"
    assert version.endswith("+cpu")


def test_another_backend_by_name_is_refused(sample_f32):
    code = (
        "import json, sys\nfrom vllm import LLM\ntry:\n"
        "    LLM(model=sys.argv[1], dtype='float32', attention_backend='TRITON_MLA')\n"
        "except Exception as error:\n    print(json.dumps(str(error)))"
    )
    message, _ = run_child(code, sample_f32)
    assert "TRITON_MLA: does not serve sparse MLA" in message
    assert "TRITON_MLA_SPARSE" in message


def test_the_triton_kernel_runs_inside_the_engine(sample_f32):
    """Top-k is 16: the second prompt exercises the indexer, and both implementations see it."""
    code = """
answers = ask(range(1, 13), range(3, 35), max_tokens=6, logprobs=4)
print(json.dumps([[o.outputs[0].token_ids, o.outputs[0].cumulative_logprob] for o in answers]))
"""
    options = json.dumps({"attention_backend": "TRITON_MLA_SPARSE"})
    triton, log = run_child(ENGINE + code, sample_f32, options, env={"TRITON_INTERPRET": "1"})
    assert "Using TRITON_MLA_SPARSE attention backend." in log
    assert "TRITON_MLA_SPARSE runs its triton kernel." in log
    reference, log = run_child(ENGINE + code, sample_f32, options)
    assert "TRITON_MLA_SPARSE runs its reference kernel." in log
    for (tokens, score), (expected, expected_score) in zip(triton, reference, strict=True):
        assert tokens == expected
        assert score == pytest.approx(expected_score, abs=1e-3)


@pytest.mark.slow
def test_chunked_prefill_and_prefix_caching(sample_f32):
    """On a prompt below top-k, where no tie can flip, chunks and cache change nothing."""
    code = """
short, long = list(range(5, 17)), list(range(40, 190))
first = ask(short, max_tokens=4, logprobs=1)[0]
ask(long, max_tokens=2)
again = ask(long, max_tokens=2)[0]
config = llm.llm_engine.vllm_config
print(json.dumps([first.outputs[0].token_ids, first.outputs[0].cumulative_logprob,
                  again.num_cached_tokens, config.scheduler_config.enable_chunked_prefill,
                  config.cache_config.enable_prefix_caching, config.cache_config.block_size]))
"""
    chunks = json.dumps({"max_num_batched_tokens": 8, "enable_prefix_caching": True})
    chunked, _ = run_child(ENGINE + code, sample_f32, chunks)
    whole, _ = run_child(ENGINE + code, sample_f32, json.dumps({"enable_prefix_caching": True}))
    assert chunked[0] == whole[0]
    assert chunked[1] == pytest.approx(whole[1], abs=1e-3)
    for _, _, cached, chunked_prefill, prefix_caching, page in (chunked, whole):
        assert cached == 128  # two whole pages of the 150 tokens
        assert chunked_prefill
        assert prefix_caching
        assert page == 64


def test_gguf_files_of_other_models_and_other_load_formats_are_left_alone(sample_f32, tmp_path):
    import gguf

    other = tmp_path / "other.gguf"
    writer = gguf.GGUFWriter(other, "llama")
    writer.add_block_count(1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    code = """
import json, sys
from types import SimpleNamespace
from glm5lab.vllm_plugin.patches import point_to_prepared_folder
models = []
for model, load_format in ((sys.argv[1], "auto"), (sys.argv[2], "gguf"), (sys.argv[2], "auto")):
    args = SimpleNamespace(model=model, load_format=load_format, tokenizer=None,
                           served_model_name=None, quantization=None,
                           enable_expert_parallel=False)
    point_to_prepared_folder(args)
    models.append(args.model == model)
print(json.dumps(models))
"""
    unchanged, _ = run_child(code, other, sample_f32)
    assert unchanged == [True, True, False]


def test_a_cache_of_another_dtype_is_refused(sample_f32):
    code = (
        "import json, sys\nfrom vllm import LLM\ntry:\n"
        "    LLM(model=sys.argv[1], dtype='float32', kv_cache_dtype='fp8')\n"
        "except Exception as error:\n    print(json.dumps(str(error)))"
    )
    message, _ = run_child(code, sample_f32)
    assert "--kv-cache-dtype fp8" in message


@pytest.mark.slow
def test_nothing_is_compiled_where_vllm_would(sample_f32):
    """Without the breakable graphs that vLLM turns on by itself it would trace the model."""
    code = (
        ENGINE.replace("enforce_eager=True, ", "")
        + """
print(json.dumps(ask(range(3, 35), max_tokens=2)[0].outputs[0].token_ids))
"""
    )
    options = json.dumps({"compilation_config": {"mode": 2}})
    compiled, _ = run_child(code, sample_f32, options, env={"VLLM_USE_BREAKABLE_CUDAGRAPH": "0"})
    eager, _ = run_child(code, sample_f32, "{}")
    assert compiled == eager


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, 1 << 30),
        pytest.param({"kv_cache_memory_bytes": 2 << 28}, 2 << 28, marks=pytest.mark.slow),
    ],
)
def test_the_cpu_cache_is_small_unless_the_user_says(sample_f32, options, expected):
    code = """
import json, sys
from vllm.engine.arg_utils import EngineArgs
options = json.loads(sys.argv[2])
cache = EngineArgs(model=sys.argv[1], **options).create_engine_config().cache_config
print(json.dumps(cache.kv_cache_memory_bytes))
"""
    size, _ = run_child(code, sample_f32, json.dumps(options), env={"VLLM_CPU_KVCACHE_SPACE": ""})
    assert size == expected
