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
# # 0. The environment
#
# Which way through GLM-5 can this machine take: which engine, which GPU, which kernels? Trouble at this level shows late and
# far from its cause, so it is asked first.
#
# On the command line: `glm5lab env`.

# %%
from glm5lab.views.source import choose_file

source = choose_file()

# %% [markdown]
# All notebooks begin with this cell: they work on a small sample unless `GLM5LAB_FILE` names a GGUF file, or one is picked in
# JupyterLab. The sample has GLM-5's real architecture and names, and random weights.
#
# ## What stock vLLM says
#
# vLLM's platform, asked in a process of its own that loads no plugins, for the attention that GLM-5 needs: MLA, sparse, bfloat16.
# On a machine without a GPU it refuses. On an RTX PRO 6000 (SM120) it has nothing for a bfloat16 cache, and without FlashInfer nothing
# at all: notebook 4 shows its reasons.

# %%
from glm5lab.views.stock import stock_attention

print(stock_attention())

# %% [markdown]
# ## The cause
#
# vLLM chooses kernels by platform and by the GPU's compute capability, from a list. A platform that is not on it gets none, though
# nothing in the computation needs that hardware. What decides is all in this report:

# %%
from pathlib import Path

from glm5lab import env

facts = env.report()
print(env.format_report(facts).replace(str(Path.home()), "~"))

# %% [markdown]
# ## The remedy
#
# glm5lab adds one implementation for every platform: a Triton kernel on GPUs, and on a CPU the plain PyTorch reference, slow but
# exact. Triton's interpreter can run the real kernel on a CPU too.

# %% tags=["nbval-check-output"]
for platform in ("cuda", "cpu"):
    print(f"{platform:<5} {env.attention_path(platform)}")

# %%
print(f"this machine: {facts['platform']}, {facts['attention']}")

# %% [markdown]
# One kernel does not fit every GPU, though. A block of a Triton kernel keeps its tiles in shared memory: a data-centre GPU (SM90,
# SM100) has 227 KiB of it a block, the RTX PRO 6000 and 5090 (SM120), GB10 (SM121) and 4090 (SM89) have 99 KiB. So tiles chosen on
# one do not start on the other, and glm5lab's are chosen by that number. Here for two lines as `nvidia-smi` prints them:

# %% tags=["nbval-check-output"]
lines = """\
NVIDIA H200, 9.0, 143771, 580.95.05
NVIDIA RTX PRO 6000 Blackwell Server Edition, 12.0, 97887, 580.95.05
"""
for gpu in env.parse_gpus(lines):
    major, minor = gpu.capability
    print(f"SM{major}{minor:<3} {gpu.shared_memory:,} bytes a block  {gpu.name}")

# %% [markdown]
# ## The proof
#
# Everything that the later notebooks rely on is there: an engine, the reader of GGUF files, and the two referees (transformers, and
# xllamacpp, which is llama.cpp). What is missing stands in the report above with the command that installs it.

# %% tags=["nbval-check-output"]
print("an engine is installed:", facts["engine"] is not None)
for package in ("torch", "triton", "gguf", "transformers", "xllamacpp"):
    print(f"{package}: {'there' if facts['packages'][package] else 'missing'}")

# %% [markdown]
# And being installed costs vLLM nothing. It imports its plugins in every process that it starts, so `import glm5lab` and the plugin's
# entry point must not pull in torch or vLLM.

# %% tags=["nbval-check-output"]
import subprocess
import sys

code = "import sys, glm5lab, glm5lab.vllm_plugin; print(*sys.modules)"
child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
heavy = {"numpy", "pandas", "torch", "transformers", "vllm"} & set(child.stdout.split())
print("heavy modules loaded with glm5lab:", sorted(heavy))

# %% [markdown]
# ## With your own machine
#
# `glm5lab env --capability 12.0` asks the vLLM that is installed what it would choose on another GPU, without having one.

# %%
source.close()
