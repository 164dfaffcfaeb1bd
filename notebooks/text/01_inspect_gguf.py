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
# What is in a GGUF file of GLM-5, does it hold all that an engine needs, and on how many GPUs does it fit? The header alone answers,
# in a second, also for a file that is still on a server.
#
# On the command line: `glm5lab inspect FILE`, `glm5lab plan FILE --gpus 8 --gpu-memory 96`, and `glm5lab sample DIR`. The first two
# take `--json`, and addresses: of a remote file they read the headers only.

# %%
from glm5lab.views.source import choose_file

source = choose_file(types="mix", shards=3, metadata_first_shard=True, hf=True)

# %% [markdown]
# ## What stock tools say
#
# A published GLM-5 is a set of shards, and the one to name is the first. gguf-py's reader opens what it is given, finds no tensors
# there, and calls that a success. transformers, which vLLM asks for the configuration, does not know the architecture.

# %%
from glm5lab.views.stock import stock_config, stock_tensors

print("gguf-py:", stock_tensors(source.file), "tensors")
print("transformers:", stock_config(source.file))

# %% [markdown]
# ## The cause
#
# Large sets often have a first shard with metadata only. And of the fields that vLLM reads, some stand under other names in the file
# and some nowhere. So a reader has to take the set as a whole, and a translation has to know what is implied.
#
# ## The remedy: one table over all shards
#
# `shape` is in PyTorch's order, [out, in]; shards are counted from 1, as in their names.

# %% tags=["nbval-check-output"]
from glm5lab.gguf.reader import open_gguf

sample = open_gguf(source.sample)
for number, shard in enumerate(sample.shards, 1):
    held = (sample.table().shard == number).sum()
    print(f"{shard.name}  {held:>3} tensors")
print(f"{len(sample.table())} tensors, {sample.nbytes:,} bytes, {sample.architecture}")

# %%
model = open_gguf(source.file)
table = model.table()
table.head(8)

# %% [markdown]
# Bytes by role and type; a fused vLLM layer, such as `attn_q_a` with `attn_kv_a_mqa`, can hold two types. In JupyterLab there is also
# a search over the table: parts of a name, and a number for a layer (`indexer 3`).

# %% tags=["figure"]
from glm5lab.views.charts import types_figure
from glm5lab.views.live import tensor_explorer

tensor_explorer(table, types_figure(model))

# %% [markdown]
# The search as a call. Three things to see in the indexer's tensors decide how a file has to be loaded: `indexer.proj` (vLLM's
# `weights_proj`) is quantized, but vLLM builds that layer unquantized, whatever the file holds; it is fused with `indexer.attn_k`,
# which has another type; and norms stay F32.

# %% tags=["nbval-check-output"]
from glm5lab.views.live import find_tensors

found = find_tensors(sample.table(), "indexer 3")
print(found[["name", "shape", "type", "nbytes"]].to_string(index=False))

# %% [markdown]
# ## Where the bytes are
#
# One bar a layer. Layer 0 has a dense feed-forward part, the others have experts; "outside" are the embedding and the output.

# %% tags=["figure"]
from glm5lab.views.charts import bytes_figure

bytes_figure(model).show(renderer="plotly_mimetype")

# %% [markdown]
# ## The proof: configuration and tokenizer from the header alone
#
# The sample's Hugging Face twin was written from the architecture, not from the GGUF's metadata, so comparing the two tests
# the translation. Of the twin's fields only `dtype` differs: the twin holds the dequantized weights in float32.

# %% tags=["nbval-check-output"]
import json

from glm5lab.gguf.config import hf_config

config = hf_config(sample)
twin = json.loads((source.folder / "hf" / "config.json").read_text())
different = [field for field in twin if config.get(field) != twin[field]]
print(f"{len(twin)} fields in the twin, different: {different}")

# %% [markdown]
# Five fields are read by vLLM although neither the metadata nor Hugging Face's configuration class has them in this form. Without
# the first three vLLM drops the router's correction bias, routes by softmax, and rotates the indexer's keys in the wrong order;
# without the fourth it expects an indexer on every layer.

# %% tags=["nbval-check-output"]
for field in (
    "topk_method",
    "scoring_func",
    "indexer_rope_interleave",
    "index_topk_pattern",
    "num_nextn_predict_layers",
):
    print(f"{field} = {config[field]!r}")

# %% [markdown]
# The tokenizer, with special tokens and chat template: any text has to come back unchanged.

# %% tags=["nbval-check-output"]
from transformers import AutoTokenizer

from glm5lab.gguf.tokenizer import write_tokenizer

(source.folder / "tokenizer").mkdir()
write_tokenizer(sample, source.folder / "tokenizer")
tokenizer = AutoTokenizer.from_pretrained(source.folder / "tokenizer")
text = "GLM-5 reads naïve, 北京, 🙂\n  and 12345."
print("round trip unchanged:", tokenizer.decode(tokenizer(text).input_ids) == text)
question = [{"role": "user", "content": "Hello"}]
print(repr(tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)))

# %% [markdown]
# ## Does it fit
#
# The header decides that as well. The sums are those of vLLM's own parameters: every tensor by what one GPU keeps of it (a slice,
# the whole, nothing), quantized or not. Cache rows are shared by all heads, so tensor parallelism does not divide them. Only the
# workspace is an estimate. `data/metadata/` records the types of public files; here is GLM-5's Q4_K_M, from headers without weights.

# %% tags=["nbval-check-output"]
from glm5lab.gguf.layout_files import write_layout
from glm5lab.gguf.layouts import read_layouts
from glm5lab.views.plan import plan_text

layouts = read_layouts()
glm5 = open_gguf(write_layout(layouts["glm-5-q4_k_m"], source.folder / "glm-5"))
text, fits = plan_text(glm5, gpus=8, gpu_memory=96, width=100)
print(text)

# %% [markdown]
# The same for 1 to 16 GPUs, the fullest of them. In JupyterLab there are sliders for the number and the card.

# %% tags=["figure"]
from glm5lab.views.live import memory_explorer

memory_explorer(glm5 if source.is_sample else model)

# %% [markdown]
# In Q8_0 the same model does not fit on eight: the answer is no, with what is missing.

# %% tags=["nbval-check-output"]
large = open_gguf(write_layout(layouts["glm-5-q8_0"], source.folder / "glm-5-q8_0"))
text, fits = plan_text(large, gpus=8, gpu_memory=96, width=100)
print(*text.splitlines()[1:3], sep="\n")

# %% [markdown]
# GLM-5.2 shares top-k choices among layers, and vLLM hands none of them from one pipeline stage to the next: a stage has to begin
# at a layer that chooses for itself. The plan finds such a division and names the variable for it.

# %% tags=["nbval-check-output"]
from glm5lab.gguf.plan import make_plan

shared = open_gguf(write_layout(layouts["glm-5.2-ud-iq2_xxs"], source.folder / "glm-5.2"))
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

sample.shards[-1].unlink()
try:
    open_gguf(source.sample)
except InputError as error:
    print("cause:", error.cause)
    print("fix:  ", error.fix.replace(str(source.folder), "FOLDER"))

# %% [markdown]
# ## With your own file
#
# `GLM5LAB_FILE=/models/NAME-00001-of-00011.gguf make lab`, or the picker above. Before downloading anything:
# `glm5lab plan hf://OWNER/REPO/PATH-00001-of-00011.gguf --gpus 8 --gpu-memory 96` reads some MiB.

# %%
source.close()
