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
# # 4. The backend
#
# Which attention does vLLM take for GLM-5 on a GPU, and why not another? And when it takes ours, are the numbers right? Most reports
# stop at a line in the log, *Using TRITON_MLA_SPARSE attention backend*, which proves selection only.
#
# On the command line: `glm5lab env --capability 12.0`, `glm5lab check FILE`, and on a GPU `glm5lab backends`.

# %%
import os

from glm5lab.views.quiet import quiet
from glm5lab.views.source import choose_file

source = choose_file()
os.environ["GLM5LAB_CACHE"] = str(source.folder / "cache")
os.environ["VLLM_LOGGING_LEVEL"] = "INFO"  # into the log file, for the line that is read below
os.environ["VLLM_LOGGING_COLOR"] = "0"
log = source.folder / "engine.log"

# %% [markdown]
# ## What stock vLLM says
#
# vLLM's own selection, asked as if this machine had an RTX PRO 6000 (compute capability 12.0): `stock` is what it takes without
# glm5lab, `here` with it, and `against` its words about other sparse backends. In JupyterLab other capabilities can be chosen.

# %%
from glm5lab.selection_table import selection
from glm5lab.views.selection import selection_explorer, selection_rows

table = selection(["12.0"])
selection_explorer(table, "12.0")

# %% tags=["nbval-check-output"]
rows = selection_rows(table, "12.0").set_index(["flashinfer", "cache"])
for flashinfer in ("with", "without"):
    row = rows.loc[(flashinfer, "bfloat16")]
    print(f"bfloat16 cache, {flashinfer} FlashInfer: stock {row['stock']}, here {row['here']}")

# %% [markdown]
# ## The cause, and the remedy
#
# Every native backend has a list of GPUs and of cache formats. glm5lab registers one more through vLLM's entry points, behind the
# native ones, which keep winning where they can; nothing in the installed vLLM is edited. vLLM calls `register` in every process,
# sometimes more than once, and repeating it must change nothing.

# %% tags=["nbval-check-output"]
with quiet(log):
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from glm5lab.vllm_plugin import BACKEND, register

    register()
    members = len(AttentionBackendEnum.__members__)
    register()

backend = AttentionBackendEnum[BACKEND].get_class()
print(f"{BACKEND} is {backend.__module__}.{backend.__name__}")
print("sparse:", backend.is_sparse(), "| MLA:", backend.is_mla())
print("registered twice, entries added:", len(AttentionBackendEnum.__members__) - members)

# %% [markdown]
# ## The proof: the real engine against two referees
#
# `run_check` runs vLLM on prompts shorter and longer than the sample's top-k of 16, then feeds the same tokens to Hugging Face
# transformers and to llama.cpp, which share no code with the loader. The engine's own output goes to a log file.

# %%
from glm5lab.check import run_check

with quiet(log):
    report = run_check(source.sample, prompts=(8, 40), attention_backend=BACKEND)

# %% tags=["nbval-check-output"]
from glm5lab.serving.server import selected_backend

line = selected_backend(log.read_text().splitlines())
print("the engine names our backend:", line is not None)
print("its attention layers were built with:", report.backend)

# %% [markdown]
# A row is the distribution of one next token. It agrees when the most likely token is the same and no log-probability is off
# by more than the tolerance. Only prompts longer than top-k test the indexer at all.

# %%
print(report.format())

# %% tags=["nbval-check-output"]
for referee in ("hf", "llama.cpp"):
    rows = [row for row in report.rows if row.referee == referee]
    print(
        f"{referee:<9} argmax equal everywhere: {all(r.argmax_equal == r.rows for r in rows)},",
        f"within {report.tolerance:g}: {all(r.largest <= report.tolerance for r in rows)}",
    )
print("agree:", report.ok)

# %% [markdown]
# ## The same line in the log, with a broken model
#
# One deliberate mistake: `k_b` is taken as it lies in the file, not transposed head by head. All shapes fit, the loader's
# audit passes, the engine selects the same backend. Only the referee notices.

# %% tags=["nbval-check-output"]
from unittest.mock import patch

from glm5lab.loading.transforms import join_kv_b


def untransposed(k_b, v_b):
    heads, latent, nope = k_b.shape
    return join_kv_b(k_b.reshape(heads, nope, latent).transpose(0, 2, 1), v_b)


with quiet(log), patch("glm5lab.loading.transforms.join_kv_b", untransposed):
    broken = run_check(source.sample, against=["hf"], prompts=(8,), attention_backend=BACKEND)

audits = log.read_text().count("each parameter was filled, each tensor was used")
print("loads whose audit passed:", audits, "of 2")
print("built with:", broken.backend)
print("agree:", broken.ok)

# %%
print(broken.summary())

# %% [markdown]
# ## With your own file
#
# `glm5lab check FILE` does this for any file that fits into memory in float32. On a GPU, `glm5lab backends answers` compares the
# backend with vLLM's own, in its engine; what that gave on two H200s is in `data/measurements/backend_answers.json`.

# %%
source.close()
