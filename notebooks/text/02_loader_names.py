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
# Does every tensor of the file reach exactly one vLLM parameter, and is every parameter filled? Where not, nothing fails: the model
# talks nonsense, with no error anywhere.
#
# On the command line: `glm5lab map FILE` and `glm5lab prepare FILE`.

# %%
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.reader import open_gguf
from glm5lab.views.source import choose_file

source = choose_file(types="mix", hf=True)
sample = open_gguf(source.sample)
config = hf_config(sample)

# %% [markdown]
# ## What stock tools say
#
# gguf-py has the map from Hugging Face's names to GGUF's that converters use. Asked for every tensor of the sample's Hugging Face
# twin, it knows a third. The converter stacks the experts, so single ones have no name, and it splits `kv_b_proj` in two, so that the
# name which the map gives is in no file.

# %% tags=["nbval-check-output"]
from safetensors.numpy import load_file

from glm5lab.views.stock import stock_names

twin = load_file(source.folder / "hf" / "model.safetensors")
answers = stock_names(twin, config["num_hidden_layers"])
absent = [name for name, gguf in answers.items() if gguf not in sample.tensors]
unknown = [name for name in absent if answers[name] is None]
print(f"{len(twin)} HF tensors: {len(twin) - len(absent)} found by the map's name,")
print(f"{len(absent) - len(unknown)} given one that is in no file, {len(unknown)} without a name")
for name in ("self_attn.kv_b_proj.weight", "mlp.experts.0.up_proj.weight"):
    print(f"{name} -> {answers[f'model.layers.1.{name}']}")

# %% [markdown]
# The other way round goes wrong too. Quantized parameters are called `qweight` in vLLM, and vllm-gguf-plugin (0.0.5) makes that name
# by this `replace`. It also hits the indexer's `weights_proj`, and the tensor finds no parameter any more:

# %% tags=["nbval-check-output"]
projections = [name for name in twin if name.endswith("indexer.weights_proj.weight")]
replaced = [name.replace("weight", "qweight") for name in projections]
lost = [name for name in replaced if "weights_proj" not in name.split(".")]
print(*replaced[:2], sep="\n")
print(f"{len(lost)} of {len(projections)} layers lose their head weights")

# %% [markdown]
# ## The cause, and the remedy
#
# A name is a list of components, and a rename is right on whole components only:

# %% tags=["nbval-check-output"]
from glm5lab.loading.names import rename_component

for name in projections[:2]:
    print(rename_component(name, "weight", "qweight"))

# %% [markdown]
# From names made so comes one table: for each tensor of the file its vLLM parameter, which piece of it (in brackets), and what is
# changed on the way. Blocks are folded; `a rank` is what one GPU or CPU process holds once loaded.

# %% tags=["nbval-check-output"]
from glm5lab.views.names import name_map, names_text

print(names_text(name_map(sample, config, gpu=False), width=140))

# %% [markdown]
# The same table is a DataFrame, one row a tensor, and knows several GPUs: what each holds when they share every layer of the file that
# was chosen above. In JupyterLab there is also a search over it (a number means a layer).

# %% tags=["figure"]
from glm5lab.loading.table import name_table
from glm5lab.views.ranks import names_explorer

model = open_gguf(source.file)
names_explorer(model)

# %% [markdown]
# A slice of a row can end inside a block of 256 weights. Both ranks keep that block then; the table says before anything is loaded
# for which matrices, and what it costs each rank:

# %% tags=["nbval-check-output"]
halved = name_table(sample, config, tp=2, gpu=True)
cut = halved[halved["border_bytes"] > 0]
print(cut[["name", "type", "rank_bytes", "border_bytes"]].to_string(index=False))

# %% [markdown]
# ## Quantized in the file, unquantized in vLLM
#
# vLLM fuses the indexer's `wk` and `weights_proj` into one layer that it builds without quantization. So both are dequantized,
# whatever type the file has for them.

# %% tags=["nbval-check-output"]
from glm5lab.loading.reconcile import reconcile

result = reconcile(sample, config)
for mapping in result.loaded:
    if "wk_weights_proj" in mapping.vllm and mapping.gguf.startswith("blk.0."):
        tensor = sample.tensors[mapping.gguf]
        values = sample.dequantize(mapping.gguf)
        print(f"{mapping.gguf:<28} {tensor.type} -> {values.dtype} {list(values.shape)}")
        print(f"{'':<28} part {mapping.part} of {mapping.vllm}")

# %% [markdown]
# ## `kv_b` rebuilt from `k_b` and `v_b`
#
# `k_b` lies in the file transposed, head by head. The twin has the whole matrix, written without this layer's code. Joined as it
# should be, ours is equal to it; taken as it lies, it has the same shape and other values, which no loader notices.

# %% tags=["nbval-check-output"]
import numpy as np

from glm5lab.loading.transforms import join_kv_b

expected = twin["model.layers.0.self_attn.kv_b_proj.weight"]
k_b, v_b = (sample.dequantize(f"blk.0.attn_{part}_b.weight") for part in "kv")
heads, latent, nope = k_b.shape
joined = join_kv_b(k_b, v_b)
wrong = np.concatenate([k_b.reshape(heads, nope, latent), v_b], axis=1).reshape(-1, latent)
print(f"k_b {list(k_b.shape)}, v_b {list(v_b.shape)}, kv_b {list(joined.shape)}")
for how, matrix in (("transposed, head by head", joined), ("taken as it lies", wrong)):
    shape, values = matrix.shape == expected.shape, np.array_equal(matrix, expected)
    print(f"{how}: same shape {shape}, same values {values}")

# %% [markdown]
# The difference to the twin, drawn: nothing but 0 on the left; on the right the rows of each head's `k_b` are wrong and those of its
# `v_b` are right.

# %% tags=["figure"]
from glm5lab.views.ranks import difference_figure

difference_figure(expected, {"joined": joined, "taken as it lies": wrong}).show(
    renderer="plotly_mimetype"
)

# %% [markdown]
# ## The proof: every value
#
# The same comparison for all tensors, the experts unstacked one by one.

# %% tags=["nbval-check-output"]
from glm5lab.loading.transforms import hf_weights

loaded = {name: values.numpy() for name, values in hf_weights(sample, result.loaded)}
print(f"{len(result.loaded)} tensors of the file become {len(loaded)} HF tensors")
print("same names as the twin:", loaded.keys() == twin.keys())
print("all values equal:", all(np.array_equal(loaded[name], twin[name]) for name in twin))

# %% [markdown]
# And what does not fit is named. One tensor renamed on purpose: both sides of the mistake are reported, and loading stops before it
# starts.

# %% tags=["nbval-check-output"]
from glm5lab.errors import InputError
from glm5lab.loading.reconcile import require_complete

sample.tensors["blk.2.indexer.qproj.weight"] = sample.tensors.pop("blk.2.indexer.proj.weight")
for problem in reconcile(sample, config).problems:
    print(problem)
try:
    require_complete(sample, config)
except InputError as error:
    print("refused:", error.cause.partition(":")[0])

# %% [markdown]
# ## With your own file
#
# `glm5lab map FILE --tp 8` prints this table for eight GPUs and exits with 1 where something does not fit. For the file that was
# chosen above:

# %%
if not source.is_sample:
    print(names_text(name_map(model), width=140))
else:
    print("the sample: set GLM5LAB_FILE, or pick a file above")
source.close()
