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
# # 1. The file
#
# A GGUF model is a header (metadata, and a list of tensors) in front of the weights, often split over many shards. This layer
# accounts for every tensor, type and byte, and shows that the header alone gives the configuration and the tokenizer that vLLM
# wants. In practice the first shard often holds no tensors at all, a missing shard goes unnoticed, types differ between the
# layers and even within one fused layer, and some fields that vLLM reads stand nowhere in the file.
#
# On the command line: `glm5lab sample DIR`, `glm5lab inspect FILE` and `glm5lab plan FILE --gpus 8 --gpu-memory 96`; the last two take
# `--json`, too, and the address of a remote file, of which they read the headers only.

# %% [markdown]
# ## A small file like the real ones
#
# The sample is a GLM-5 with random weights: real architecture, names and metadata, five small layers, quantized as
# `llama-quantize` mixes types. It has three shards, and the first has no tensors.

# %% tags=["nbval-check-output"]
import tempfile
from pathlib import Path

from glm5lab.gguf.reader import open_gguf
from glm5lab.gguf.sample import write_sample

workspace = tempfile.TemporaryDirectory(prefix="glm5lab-")
folder = Path(workspace.name)
first = write_sample(folder, types="mix", shards=3, metadata_first_shard=True, hf=True)

model = open_gguf(first)
table = model.table()
for number, shard in enumerate(model.shards, 1):
    print(f"{shard.name}  {(table.shard == number).sum():>3} tensors")
print(f"{len(table)} tensors, {model.nbytes:,} bytes, architecture {model.architecture}")

# %% [markdown]
# ## Every tensor
#
# One table over all shards. `shape` is in PyTorch's order, [out, in]; `offset` counts bytes from the start of the shard,
# and shards are counted from 1, as in their names.

# %%
table.head(8)

# %% [markdown]
# ## Types by role
#
# The same table grouped, much as `glm5lab inspect` prints it. Three things in it decide how the file has to be loaded:
#
# - `indexer.proj` (vLLM's `weights_proj`) is quantized here, but vLLM builds that layer unquantized, whatever the file holds.
# - `attn_k_b` is Q5_0 while its neighbours are K-quants: its rows of 192 values cannot hold a block of 256.
# - `indexer.attn_k` and `indexer.proj` are one fused layer in vLLM, with two types in the file.

# %% tags=["nbval-check-output"]
from glm5lab.gguf.layer_ranges import layer_ranges

roles = table.groupby("role", sort=False).agg(
    layers=("layer", lambda layers: layer_ranges(layers.dropna())),
    types=("type", lambda types: "/".join(sorted(set(types)))),
    tensors=("name", "size"),
    nbytes=("nbytes", "sum"),
)
print(roles.to_string(formatters={"nbytes": "{:,}".format}))

# %% [markdown]
# ## Where the bytes are
#
# One bar a layer. Layer 0 has a dense feed-forward part, the others have experts; "outside" are the embedding and the output.

# %%
from glm5lab.views.charts import bytes_figure

bytes_figure(model).show(renderer="plotly_mimetype")

# %% [markdown]
# The same bytes by role and type: a fused vLLM layer, such as `attn_q_a` with `attn_kv_a_mqa`, can hold two types, and one role
# can change its type from layer to layer.

# %%
from glm5lab.views.charts import types_figure

types_figure(model).show(renderer="plotly_mimetype")

# %% [markdown]
# ## The configuration, from metadata alone
#
# `hf_config` returns the complete `config.json`. Five of its fields are read by vLLM although neither the metadata nor Hugging
# Face's configuration class has them in this form. Without the first three vLLM drops the router's correction bias, routes by
# softmax, and rotates the indexer's keys in the wrong order; without the fourth it expects an indexer on every layer.

# %% tags=["nbval-check-output"]
from glm5lab.gguf.config import hf_config

config = hf_config(model)
for field in (
    "topk_method",
    "scoring_func",
    "indexer_rope_interleave",
    "index_topk_pattern",
    "num_nextn_predict_layers",
):
    print(f"{field} = {config[field]!r}")

# %% [markdown]
# The sample's Hugging Face twin was written from the architecture, not from the GGUF's metadata, so comparing the two tests
# the translation. Of the twin's fields only `dtype` differs: the twin holds the dequantized weights in float32.

# %% tags=["nbval-check-output"]
import json

twin = json.loads((folder / "hf" / "config.json").read_text())
different = [field for field in twin if config.get(field) != twin[field]]
print(f"{len(twin)} fields in the twin, different: {different}")

# %% [markdown]
# ## The tokenizer, from metadata alone
#
# Token list, merges, special tokens and the chat template all lie in the header. Any text has to come back unchanged.

# %% tags=["nbval-check-output"]
from transformers import AutoTokenizer

from glm5lab.gguf.tokenizer import write_tokenizer

(folder / "tokenizer").mkdir()
write_tokenizer(model, folder / "tokenizer")
tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")

text = "GLM-5 reads naïve, 北京, 🙂\n  and 12345."
ids = tokenizer(text).input_ids
print("round trip unchanged:", tokenizer.decode(ids) == text)
question = [{"role": "user", "content": "Hello"}]
print(repr(tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)))

# %% [markdown]
# ## Does it fit
#
# The header decides that as well. The sums are those of vLLM's own parameters: every tensor by what one GPU keeps of it (a slice,
# the whole, nothing), quantized or not. Cache rows are shared by all heads, so tensor parallelism does not divide them. Only the
# workspace is an estimate.
#
# `data/metadata/` records the types of public files; here is GLM-5's Q4_K_M on eight cards of 96 GiB, from headers without weights.

# %% tags=["nbval-check-output"]
from glm5lab.gguf.layout_files import write_layout
from glm5lab.gguf.layouts import read_layouts
from glm5lab.views.plan import plan_text

glm5 = open_gguf(write_layout(read_layouts()["glm-5-q4_k_m"], folder / "glm-5"))
text, fits = plan_text(glm5, gpus=8, gpu_memory=96, width=100)
print(text)

# %%
from glm5lab.gguf.plan import make_plan
from glm5lab.views.charts import memory_figure

memory_figure(make_plan(glm5, gpus=8, gpu_memory_gib=96)).show(renderer="plotly_mimetype")

# %% [markdown]
# In Q8_0 the same model does not: the answer is no, with what is missing.

# %% tags=["nbval-check-output"]
large = open_gguf(write_layout(read_layouts()["glm-5-q8_0"], folder / "glm-5-q8_0"))
text, fits = plan_text(large, gpus=8, gpu_memory=96, width=200)
print(text.splitlines()[1])

# %% [markdown]
# GLM-5.2 shares top-k choices among layers, and vLLM hands none of them from one pipeline stage to the next: a stage has to begin
# at a layer that chooses for itself. The plan finds such a division and names the variable for it.

# %% tags=["nbval-check-output"]
shared = open_gguf(write_layout(read_layouts()["glm-5.2-ud-iq2_xxs"], folder / "glm-5.2"))
best = make_plan(shared, gpus=8, gpu_memory_gib=96, pp=4).best
print(best.environment)
for stage in best.stages:
    print(f"layers {stage.layers[0]:>2}-{stage.layers[-1]}: {stage.indexers} choose for themselves")

# %% [markdown]
# ## A missing shard is an error
#
# It names what is missing, instead of loading what is left.

# %% tags=["nbval-check-output"]
from glm5lab.errors import InputError

model.shards[-1].unlink()
try:
    open_gguf(first)
except InputError as error:
    print("cause:", error.cause)
    print("fix:  ", error.fix.replace(str(folder), "FOLDER"))

# %%
workspace.cleanup()
