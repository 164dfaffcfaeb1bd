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
# glm5lab registers `TRITON_MLA_SPARSE` with vLLM through entry points; nothing in the installed vLLM is edited. This layer proves
# two different things. That vLLM selects the backend is easy to see, and it is where most reports stop: *Using
# TRITON_MLA_SPARSE attention backend* in the log. It proves selection only. That the numbers are right needs a referee that
# shares no code with us: Hugging Face transformers and llama.cpp, row by row.
#
# On the command line: `glm5lab check FILE`.

# %%
import os
import tempfile
from pathlib import Path

from glm5lab.gguf.sample import write_sample
from glm5lab.views.quiet import quiet

workspace = tempfile.TemporaryDirectory(prefix="glm5lab-")
folder = Path(workspace.name)
os.environ["GLM5LAB_CACHE"] = str(folder / "cache")
os.environ["VLLM_LOGGING_LEVEL"] = "INFO"  # into the log file, for the line that is read below
os.environ["VLLM_LOGGING_COLOR"] = "0"
log = folder / "engine.log"
file = write_sample(folder)

# %% [markdown]
# ## Registering
#
# vLLM calls `register` in every process, and sometimes more than once. Repeating it must change nothing.

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
# ## The real engine, once
#
# `run_check` runs vLLM on prompts shorter and longer than the sample's top-k of 16, then feeds the same tokens to both referees.
# The engine's own output goes to a log file.

# %%
from glm5lab.check import run_check

with quiet(log):
    report = run_check(file, prompts=(8, 40), attention_backend=BACKEND)

# %% [markdown]
# ## Selection: what the log says
#
# The line that people look for, and the answer of vLLM's platform when it is asked directly and no backend is named. On a CPU
# that is ours; on a GPU a native backend that accepts the model keeps winning, unless ours is asked for by name.

# %% tags=["nbval-check-output"]
from glm5lab.serving.server import selected_backend

line = selected_backend(log.read_text().splitlines())
print("the engine names our backend:", line is not None)
print("its attention layers were built with:", report.backend)

# %%
import torch
from vllm.platforms import current_platform
from vllm.v1.attention.selector import AttentionSelectorConfig

from glm5lab.serving.process import message

wanted = AttentionSelectorConfig(
    head_size=576,
    dtype=torch.bfloat16,
    kv_cache_dtype="auto",
    block_size=None,
    use_mla=True,
    use_sparse=True,
)
print("in the log:", message(line))
print("the platform:", current_platform.get_attn_backend_cls(None, wanted))

# %% [markdown]
# ## Proof: what the referees say
#
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
# ## The same line, with a broken model
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
    broken = run_check(file, against=["hf"], prompts=(8,), attention_backend=BACKEND)

audits = log.read_text().count("each parameter was filled, each tensor was used")
print("loads whose audit passed:", audits, "of 2")
print("built with:", broken.backend)
print("agree:", broken.ok)

# %%
print(broken.summary())
workspace.cleanup()
