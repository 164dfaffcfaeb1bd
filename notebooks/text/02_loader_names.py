# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     formats: ipynb,text//py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#       jupytext_version: 1.19.6
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # 2. The names
#
# Every tensor of the file has to reach exactly one vLLM parameter, and every parameter has to be filled. This goes wrong
# silently: tensors that a loader does not know are dropped, parameters that nobody fills keep whatever was in memory, and a
# matrix of the right shape in the wrong order loads without complaint. The model then talks nonsense, with no error anywhere.
#
# On the command line: `glm5lab map FILE` and `glm5lab prepare FILE`.

# %% [markdown]
# ## The table
#
# One line a role, its blocks folded. In brackets: which piece of a fused vLLM parameter a tensor becomes. `a rank` is what one
# GPU or CPU process holds of it once loaded.

# %% tags=["nbval-check-output"]
import tempfile
from pathlib import Path

from glm5lab.gguf.config import hf_config
from glm5lab.gguf.reader import open_gguf
from glm5lab.gguf.sample import write_sample
from glm5lab.views.names import name_map, names_text

workspace = tempfile.TemporaryDirectory(prefix="glm5lab-")
folder = Path(workspace.name)
model = open_gguf(write_sample(folder, types="mix", hf=True))
config = hf_config(model)
print(names_text(name_map(model, config, gpu=False), width=140))

# %% [markdown]
# The same table is a DataFrame, one row a tensor; `tp` and `pp` divide it over ranks, `gpu` says whether kernels take quantized
# weights. Here: what a rank holds on either, and which matrices two ranks cannot share, because a slice of a row would end
# inside a block of 256 weights.

# %% tags=["nbval-check-output"]
from glm5lab.loading.table import name_table

cpu, gpu = (name_table(model, config, gpu=gpu) for gpu in (False, True))
print(f"a rank on the CPU {cpu['rank_bytes'].sum():,} bytes, on a GPU {gpu['rank_bytes'].sum():,}")
print(gpu.groupby("kernel")["rank_bytes"].agg(["count", "sum"]).to_string())

halved = name_table(model, config, tp=2, gpu=True)
cut = halved[halved["problem"].str.contains("ranks")]
for name, problem in zip(cut["name"], cut["problem"], strict=True):
    print(f"{name}: {problem}")

# %% [markdown]
# ## Rename components, not substrings
#
# Quantized parameters are called `qweight` in vLLM. A global replace of `weight` by `qweight` also hits the indexer's
# `weights_proj`, and the tensor finds no parameter any more. Renaming whole components leaves it alone.

# %% tags=["nbval-check-output"]
from glm5lab.loading.names import rename_component

name = "model.layers.3.self_attn.indexer.weights_proj.weight"
print("substring:", name.replace("weight", "qweight"))
print("component:", rename_component(name, "weight", "qweight"))

# %% [markdown]
# ## Quantized in the file, unquantized in vLLM
#
# vLLM fuses the indexer's `wk` and `weights_proj` into one layer that it builds without quantization. So both are dequantized,
# whatever type the file has for them.

# %% tags=["nbval-check-output"]
from glm5lab.loading.reconcile import reconcile

result = reconcile(model, config)
for mapping in result.loaded:
    if "wk_weights_proj" in mapping.vllm and mapping.gguf.startswith("blk.0."):
        tensor = model.tensors[mapping.gguf]
        values = model.dequantize(mapping.gguf)
        print(f"{mapping.gguf:<28} {tensor.type} -> {values.dtype} {list(values.shape)}")
        print(f"{'':<28} part {mapping.part} of {mapping.vllm}")

# %% [markdown]
# ## `kv_b` from `k_b` and `v_b`
#
# GGUF splits HF's `kv_b_proj` in two and stores `k_b` transposed, head by head. The Hugging Face twin of the sample has the
# whole matrix, written without this layer's code. Joined as it should be, ours is equal to it; without the transposition
# it has the same shape and other values, which no loader notices.

# %% tags=["nbval-check-output"]
import numpy as np
from safetensors.numpy import load_file

from glm5lab.loading.transforms import join_kv_b

twin = load_file(folder / "hf" / "model.safetensors")
expected = twin["model.layers.0.self_attn.kv_b_proj.weight"]
k_b, v_b = (model.dequantize(f"blk.0.attn_{part}_b.weight") for part in "kv")
heads, latent, nope = k_b.shape

joined = join_kv_b(k_b, v_b)
wrong = np.concatenate([k_b.reshape(heads, nope, latent), v_b], axis=1).reshape(-1, latent)
print(f"k_b {list(k_b.shape)}, v_b {list(v_b.shape)}, kv_b {list(joined.shape)}")
for how, matrix in (("transposed, head by head", joined), ("taken as it lies", wrong)):
    shape, values = matrix.shape == expected.shape, np.array_equal(matrix, expected)
    print(f"{how}: same shape {shape}, same values {values}")

# %% [markdown]
# ## Every value
#
# The same comparison for all tensors, the experts unstacked one by one.

# %% tags=["nbval-check-output"]
from glm5lab.loading.transforms import hf_weights

loaded = {name: values.numpy() for name, values in hf_weights(model, result.loaded)}
print(f"{len(result.loaded)} tensors of the file become {len(loaded)} HF tensors")
print("same names as the twin:", loaded.keys() == twin.keys())
print("all values equal:", all(np.array_equal(loaded[name], twin[name]) for name in twin))

# %% [markdown]
# ## What does not fit is named
#
# One tensor renamed on purpose: both sides of the mistake are reported, and loading stops before it starts.

# %% tags=["nbval-check-output"]
from glm5lab.errors import InputError
from glm5lab.loading.reconcile import require_complete

model.tensors["blk.2.indexer.qproj.weight"] = model.tensors.pop("blk.2.indexer.proj.weight")
for problem in reconcile(model, config).problems:
    print(problem)
try:
    require_complete(model, config)
except InputError as error:
    print("refused:", error.cause.partition(":")[0])

# %%
workspace.cleanup()
