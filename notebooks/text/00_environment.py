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
# Which engine is installed here, which GPU there is, and which way through glm5lab this machine takes. Trouble at this
# level shows late and far from its cause: a vLLM built for another platform still imports, a missing compiler comes up
# minutes later inside a worker process, and a kernel made for one GPU does not fit the shared memory of another.
#
# On the command line: `glm5lab env`.

# %%
from pathlib import Path

from glm5lab import env

facts = env.report()
print(env.format_report(facts).replace(str(Path.home()), "~"))

# %% [markdown]
# ## What every later notebook relies on
#
# An engine, the reader of GGUF files, and the two referees. What is missing is listed above together with the command that
# installs it.

# %% tags=["nbval-check-output"]
print("an engine is installed:", facts["engine"] is not None)
for package in ("torch", "triton", "gguf", "transformers", "xllamacpp"):
    print(f"{package}: {'there' if facts['packages'][package] else 'missing'}")

# %% [markdown]
# ## The path this machine takes
#
# The platform is vLLM's, and it decides which implementation of sparse attention runs. On a GPU that is the Triton kernel.
# On a CPU it is the plain PyTorch reference, slow but exact; Triton's interpreter can run the real kernel there too.

# %% tags=["nbval-check-output"]
for platform in ("cuda", "cpu"):
    print(f"{platform:<5} {env.attention_path(platform)}")

# %%
print(f"this machine: {facts['platform']}, {facts['attention']}")

# %% [markdown]
# ## Why one kernel does not fit every GPU
#
# A block of a Triton kernel keeps its tiles in shared memory. A data-centre GPU (SM90, SM100) has 227 KiB of it a block, the
# RTX PRO 6000 and 5090 (SM120), GB10 (SM121) and 4090 (SM89) have 99 KiB, so tiles chosen on one do not start on the other.
# The report reads this for each GPU that it finds; here for two lines as `nvidia-smi` prints them.

# %% tags=["nbval-check-output"]
lines = """\
NVIDIA H200, 9.0, 143771, 580.95.05
NVIDIA RTX PRO 6000 Blackwell Server Edition, 12.0, 97887, 580.95.05
"""
for gpu in env.parse_gpus(lines):
    major, minor = gpu.capability
    print(f"SM{major}{minor:<3} {gpu.shared_memory:,} bytes a block  {gpu.name}")

# %% [markdown]
# ## Importing glm5lab loads nothing heavy
#
# vLLM imports its plugins in every process that it starts, worker processes included. So `import glm5lab` and the plugin's
# entry point must not pull in torch or vLLM.

# %% tags=["nbval-check-output"]
import subprocess
import sys

code = "import sys, glm5lab, glm5lab.vllm_plugin; print(*sys.modules)"
child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
heavy = {"numpy", "pandas", "torch", "transformers", "vllm"} & set(child.stdout.split())
print("heavy modules loaded with glm5lab:", sorted(heavy))
