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
# Sparse multi-head latent attention: every query token attends to its own short list of cached rows, which the lightning
# indexer chose. This layer proves that the plain PyTorch reference is what PyTorch's own attention computes, and that the
# Triton kernel equals the reference. The usual mistakes are at the edges: an empty place that reads row 0, a token with no
# rows at all that becomes NaN, and ties that two implementations decide differently.
#
# Here Triton runs in its interpreter, so this notebook needs no GPU. Where there is one, `glm5lab demo` makes such a
# comparison with the compiled kernel.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported

import torch

from glm5lab.attention import reference
from glm5lab.attention.sparse_mla import sparse_mla as triton_sparse_mla

# %% [markdown]
# ## The reference against PyTorch
#
# GLM-5's sizes: rows of 512 latent and 64 rotary values, values are the first 512, the scale is that of heads of 256. Gathering
# each token's rows and calling `scaled_dot_product_attention` on them in float64 must give the same.

# %% tags=["nbval-check-output"]
generator = torch.Generator().manual_seed(0)
tokens, heads, top_k, slots = 6, 8, 40, 256
q = torch.randn(tokens, heads, 576, generator=generator)
kv = torch.randn(slots, 576, generator=generator)
indices = torch.randint(slots, (tokens, top_k), generator=generator, dtype=torch.int32)
scale = 256**-0.5

out, lse = reference.sparse_mla(q, kv, indices, scale)
rows = kv[indices.long()].double()[:, None].expand(-1, heads, -1, -1)
expected = torch.nn.functional.scaled_dot_product_attention(
    q.double()[:, :, None], rows, rows[..., :512], scale=scale
)[:, :, 0]
error = (out - expected).abs().max().item()
print(f"out {list(out.shape)}, lse {list(lse.shape)}")
print("within 1e-5:", error <= 1e-5)

# %%
print(f"largest difference: {error:.1e}")

# %% [markdown]
# ## Empty places, and tokens with none
#
# `-1` marks an empty place, anywhere in a list. It counts as if it were not there, even where row 0 of the cache holds rubbish.
# A token with an empty list, as padding has, gets 0 as its output and -inf as the logarithm of its sum, never NaN.

# %% tags=["nbval-check-output"]
poisoned = kv.clone()
poisoned[0] = float("nan")
sparse = indices.clamp_min(1)
gaps = torch.full((tokens, 2 * top_k), -1, dtype=torch.int32)
gaps[:, ::2] = sparse
gaps[-1] = -1

full, _ = reference.sparse_mla(q, poisoned, sparse, scale)
out, lse = reference.sparse_mla(q, poisoned, gaps, scale)
print("gaps change nothing:", torch.allclose(out[:-1], full[:-1], atol=1e-5, rtol=0))
print("empty token: all 0:", bool((out[-1] == 0).all()), "| lse:", lse[-1].unique().tolist())

# %% [markdown]
# ## The Triton kernel against the reference
#
# Same arguments, same results: an odd number of places, gaps, an empty token, a poisoned row 0, and a cache in pages as vLLM
# keeps it. The bound is that of float32, 1e-5 on values of order 1.

# %% tags=["nbval-check-output"]
pages = poisoned.view(-1, 64, 576)
odd = gaps[:, :37]
lengths = torch.tensor([37, 1, 20, 36, 0, 37], dtype=torch.int32)

found = triton_sparse_mla(q, pages, odd, scale, lengths)
expected = reference.sparse_mla(q, pages, odd, scale, lengths)
for name, a, b in zip(("out", "lse"), found, expected, strict=True):
    print(f"{name} within 1e-5:", torch.allclose(a, b, atol=1e-5, rtol=1e-5))
print("tokens without rows:", (expected[1] == float("-inf")).all(1).nonzero().flatten().tolist())

# %%
error = (found[0] - expected[0]).abs().max().item()
print(f"largest difference: {error:.1e}")

# %% [markdown]
# ## Why the logarithm of the sum is returned
#
# With it two partial results over different rows merge exactly: each is weighted by its share of the sum. Long lists are split
# this way over a GPU, and over several GPUs.

# %% tags=["nbval-check-output"]
whole, _ = reference.sparse_mla(q, kv, indices, scale)
(a, lse_a), (b, lse_b) = (
    reference.sparse_mla(q, kv, part, scale) for part in (indices[:, :13], indices[:, 13:])
)
share = torch.sigmoid(lse_a - lse_b)[..., None]
merged = share * a + (1 - share) * b
print("merged parts equal the whole, within 1e-5:", torch.allclose(merged, whole, atol=1e-5))

# %% [markdown]
# ## The indexer's choice
#
# Scores are a weighted sum of ReLUs, so exact ties happen; the lower position wins. A row with fewer visible positions than
# top-k is filled with -1. The block table then turns positions of a request into slots of the cache.

# %% tags=["nbval-check-output"]
logits = torch.tensor([[1.0, 3.0, 3.0, 0.0, 2.0], [2.0, -torch.inf, 5.0, -torch.inf, -torch.inf]])
chosen = reference.top_k(logits, 3)
print("positions:", chosen.tolist())

block_table = torch.tensor([[7, 2], [4, 0]], dtype=torch.int32)
print("slots:    ", reference.slots_of(chosen, block_table, page_size=4).tolist())

# %% [markdown]
# ## A wrong argument is named

# %% tags=["nbval-check-output"]
try:
    triton_sparse_mla(q, kv[:, :512], indices, scale)
except ValueError as error:
    print(error)

# %% [markdown]
# ## Speed beside its peers, measured
#
# GLM-5 on eight GPUs leaves 8 heads a GPU, which native kernels pad to 64. `glm5lab bench kernels` times every peer that the
# machine has in one run and checks each result there; the figures below were measured on one H200, every place of every
# list another random row. The floor is the bytes of those rows over the rate of a copy kernel.

# %%
import json
from pathlib import Path

from glm5lab.views.kernel_charts import speed_figure, speed_table

measured = json.loads(Path("../data/measurements/kernels.json").read_text())
print(measured["gpu"], measured["driver"], measured["versions"], measured["date"])
speed_table(measured, "bf16", 8).round(1)

# %%
speed_figure(measured, "bf16", 8)

# %% [markdown]
# The other cases, the bad ones too: over fp8_ds_mla rows the conversion to fp16 costs more than the memory from 256 tokens on,
# and with 64 heads FlashMLA's own tile fits. Which tile runs where stands in `glm5lab/attention/tiles.py`; `glm5lab compile`
# compiles each for SM80 to SM121 without a GPU and compares its shared memory with the device's (101,376 bytes on SM120).

# %%
speed_table(measured, "fp8_ds_mla", 8).round(1)

# %%
speed_table(measured, "bf16", 64).round(1)
