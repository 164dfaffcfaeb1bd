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
# # 3. The kernels
#
# Does the Triton kernel compute what sparse attention says, also at its edges, and does it fit the GPUs that vLLM leaves out? And
# how fast is it beside the native kernels, where those exist?
#
# On the command line: `glm5lab compile`, `glm5lab bench kernels` (on a GPU).

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported: no GPU is needed here

import torch

from glm5lab.attention import reference
from glm5lab.attention.sparse_mla import sparse_mla as triton_sparse_mla
from glm5lab.gguf.reader import open_gguf
from glm5lab.views.source import choose_file

source = choose_file(types="mix")

# %% [markdown]
# ## What stock PyTorch says
#
# Every query token attends to its own short list of cached rows; empty places of the list are -1. Written down with PyTorch's own
# attention, two things go wrong without an error: -1 reads the cache's last row, and a token whose list is empty, as padding has,
# becomes NaN once its places are masked, and spreads it.

# %% tags=["nbval-check-output"]
generator = torch.Generator().manual_seed(0)
tokens, heads, top_k, slots, scale = 6, 8, 40, 256, 256**-0.5
q = torch.randn(tokens, heads, 576, generator=generator)
kv = torch.randn(slots, 576, generator=generator)
indices = torch.randint(slots, (tokens, top_k), generator=generator, dtype=torch.int32)
indices[-1] = -1


def stock(q, kv, indices, mask=None):
    rows = kv[indices.long()].double()[:, None].expand(-1, heads, -1, -1)
    query = q.double()[:, :, None]
    attend = torch.nn.functional.scaled_dot_product_attention
    return attend(query, rows, rows[..., :512], attn_mask=mask, scale=scale)[:, :, 0]


last_row = kv[-1, :512].double()
print("an empty list yields the last row:", torch.allclose(stock(q, kv, indices)[-1, 0], last_row))
weights = torch.full((1, 1, top_k), -torch.inf).softmax(-1)
print("masked, its weights are NaN:", bool(weights.isnan().all()))

# %% [markdown]
# ## The cause, and the remedy
#
# The softmax of nothing is 0/0. An implementation has to say what an empty list means: here the output is 0 and the logarithm of the
# sum of exponentials (LSE) is -inf, so that merging it with anything changes nothing. The statement of that is the reference, in
# plain PyTorch; for full lists it equals PyTorch's own attention.

# %% tags=["nbval-check-output"]
out, lse = reference.sparse_mla(q, kv, indices, scale)
error = (out[:-1] - stock(q, kv, indices)[:-1]).abs().max().item()
print(f"out {list(out.shape)}, lse {list(lse.shape)}")
print("full lists within 1e-5 of PyTorch:", error <= 1e-5)
print("empty list: all 0:", bool((out[-1] == 0).all()), "| lse:", lse[-1].unique().tolist())

# %% [markdown]
# ## The kernel beside its reference
#
# Taken from the sources as they are. Both do the same five steps; the kernel does them for a block of heads and a block of rows at a
# time and corrects what it has when a larger score comes.

# %%
from glm5lab.views.side_by_side import SideBySide

SideBySide()

# %% [markdown]
# ## The proof: the same results
#
# An odd number of places, gaps, two tokens without rows, a poisoned row 0 (NaN, which an empty place must not read), and a cache in
# pages as vLLM keeps it. The bound is that of float32, 1e-5 on values of order 1. Triton runs in its interpreter here.

# %% tags=["nbval-check-output"]
poisoned = kv.clone()
poisoned[0] = float("nan")
gaps = torch.full((tokens, 2 * top_k), -1, dtype=torch.int32)
gaps[:, ::2] = indices.clamp_min(1)
pages, odd = poisoned.view(-1, 64, 576), gaps[:, :37]
lengths = torch.tensor([37, 1, 20, 36, 0, 0], dtype=torch.int32)

found = triton_sparse_mla(q, pages, odd, scale, lengths)
expected = reference.sparse_mla(q.double(), pages.double(), odd, scale, lengths)
for name, a, b in zip(("out", "lse"), found, expected, strict=True):
    print(f"{name} within 1e-5:", torch.allclose(a.double(), b, atol=1e-5, rtol=1e-5))
print("tokens without rows:", (expected[1] == float("-inf")).all(1).nonzero().flatten().tolist())

# %% [markdown]
# Where the errors are: token by head, against the reference in float64.

# %% tags=["figure"]
from glm5lab.views.roofline import error_figure

error_figure(found[0][:4], expected[0][:4]).show(renderer="plotly_mimetype")

# %% [markdown]
# With the LSE two partial results over different rows merge exactly: each is weighted by its share of the sum. Long lists are split
# this way over a GPU, and over several GPUs.

# %% tags=["nbval-check-output"]
whole, _ = reference.sparse_mla(q[:-1], kv, indices[:-1], scale)
(a, lse_a), (b, lse_b) = (
    reference.sparse_mla(q[:-1], kv, part, scale) for part in (indices[:-1, :13], indices[:-1, 13:])
)
share = torch.sigmoid(lse_a - lse_b)[..., None]
merged = share * a + (1 - share) * b
print("merged parts equal the whole, within 1e-5:", torch.allclose(merged, whole, atol=1e-5))

# %% [markdown]
# A wrong argument is named:

# %% tags=["nbval-check-output"]
try:
    triton_sparse_mla(q, kv[:, :512], indices, scale)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Which tokens a query attends to
#
# The lists come from the lightning indexer. Its scores are a weighted sum of ReLUs, so exact ties happen; the lower position wins. A
# row with fewer visible positions than top-k is filled with -1.

# %% tags=["nbval-check-output"]
logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 2.0], [2.0, -torch.inf, 5.0, -torch.inf, -torch.inf]])
chosen = reference.top_k(logits, 3)
print("positions:", chosen.tolist())
block_table = torch.tensor([[7, 2], [4, 0]], dtype=torch.int32)
print("slots:    ", reference.slots_of(chosen, block_table, page_size=4).tolist())

# %% [markdown]
# The indexer of the chosen file's first layer, on any text: it needs no more than the embedding and four small matrices, so a real
# GLM-5 answers in seconds. The sample's weights are random and its top-k is 16, and so its choice says nothing. In JupyterLab there
# is the text to edit, a slider for the query, and one for k.

# %% tags=["figure"]
from glm5lab.views.attended import attended_explorer

model = open_gguf(source.file)
text = "GLM-5 reads every token, but each query attends to few of them."
attended_explorer(model, text)

# %% [markdown]
# ## Does it fit the GPUs that vLLM leaves out
#
# Triton compiles for a GPU that is not here. Every tile that the code can choose, in the forms that serve and some others (fp16 and
# fp32 rows, lists of 8192), compiled for the RTX PRO 6000 (SM120): the most that any of a kernel's configurations takes; stack, bytes a
# thread, is spilled registers and frames of calls. Compiled and compared with the device's limits; nobody here has run it on one.

# %% tags=["nbval-check-output"]
from glm5lab.views.measurements import measurements, origin
from glm5lab.views.roofline import compile_figure, compile_table

compiled = measurements("compile_sm120")
print(origin(compiled), "-", compiled["command"])
print(compile_table(compiled).to_string())

# %% tags=["figure"]
compile_figure(compiled).show(renderer="plotly_mimetype")

# %% [markdown]
# ## Speed beside its peers, measured on one H200
#
# GLM-5 on eight GPUs leaves 8 heads a GPU, which native kernels pad to 64. Every peer that the machine has, in one run; one input of
# each case was checked there; places are drawn from two million rows, none twice. Microseconds a call; the floor is the bytes of those
# rows over the rate of a copy kernel; in 99 KiB: with tiles that fit a block of SM120.

# %% tags=["nbval-check-output"]
from glm5lab.views.kernel_charts import speed_figure, speed_text

measured = measurements("kernels")
print(origin(measured))
print(speed_text(measured, "bf16", 8))

# %% tags=["figure"]
speed_figure(measured, "bf16", 8).show(renderer="plotly_mimetype")

# %% [markdown]
# Over fp8_ds_mla rows 57 % of the bytes move, and every value is converted first, which costs more than the memory in long calls:

# %% tags=["nbval-check-output"]
print(speed_text(measured, "fp8_ds_mla", 8))

# %% [markdown]
# With 64 heads, as without tensor parallelism, the native kernels' tile is full, and products come to matter beside the memory.

# %% tags=["nbval-check-output"]
print(speed_text(measured, "bf16", 64))

# %% [markdown]
# All measured calls against the memory's rate (dots of one group are moved apart sideways). A dot on the line reads its rows as fast
# as a copy kernel copies. With 8 heads over bf16 rows few operations come to each byte, so that is the limit; with 64 there are eight times as many.

# %% tags=["figure"]
from glm5lab.views.roofline import roofline_figure

roofline_figure(measured).show(renderer="plotly_mimetype")

# %% [markdown]
# ## With your own GPU
#
# `glm5lab bench kernels` times all of this there, beside every peer that vLLM has for it. And here, on a GPU, the compiled kernel
# against the reference:

# %% tags=["gpu-only"]
# GPU only: elsewhere there is no compiled kernel, and the interpreter was compared above.
from glm5lab.views.compiled import compiled_kernel

print(compiled_kernel())

# %%
source.close()
