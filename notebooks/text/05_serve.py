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
# # 5. The server
#
# The end of the way: vLLM's OpenAI server over the GGUF file, in a process of its own, with the backend of the last
# notebook. It proves that requests over HTTP are answered, and that nothing is left running afterwards. In practice a server
# fails minutes after its start with the cause far up in the log of a worker, and a stopped one leaves workers behind that keep
# the GPU's memory.
#
# On the command line: `glm5lab serve FILE`.

# %%
import os
import tempfile
from pathlib import Path

from glm5lab.gguf.sample import write_sample
from glm5lab.serving.server import Server

workspace = tempfile.TemporaryDirectory(prefix="glm5lab-")
folder = Path(workspace.name)
os.environ["GLM5LAB_CACHE"] = str(folder / "cache")
file = write_sample(folder)

# %% [markdown]
# ## Start
#
# A free port on 127.0.0.1; options go on to vLLM as they are. vLLM's output goes to a log file. If the server cannot start,
# `wait_ready` raises the first error of that log, not the last.

# %%
server = Server.of_file(
    file, options=["--served-model-name", "tiny-glm5"], log=folder / "server.log"
)
server.start()
print(f"ready after {server.wait_ready(timeout_s=240):.0f} s")

# %% tags=["nbval-check-output"]
from glm5lab.serving.client import Client

client = Client(server.url)
print("listens on:", server.url.rpartition(":")[0])
print("healthy:", client.healthy())
print("models:", client.models())
print("the engine names TRITON_MLA_SPARSE:", server.backend is not None)

# %% [markdown]
# ## A completion, and a chat
#
# The sample's weights are random, so the answers say nothing sensible; that they come is the point.

# %%
settings = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
completion = client.completion("GLM-5 is", **settings)
question = [{"role": "user", "content": "Which layers does a served GLM-5 have?"}]
chat = client.chat(question, **settings)
print("completion:", repr(completion))
print("chat:      ", repr(chat))

# %% tags=["nbval-check-output"]
print("the completion has text:", len(completion) > 0)
print("the chat has text:", len(chat) > 0)

# %% [markdown]
# ## A streamed chat
#
# The answer comes piece by piece while it is generated.

# %% tags=["nbval-check-output"]
pieces = list(client.stream_chat(question, **settings))
print("more than one piece:", len(pieces) > 1)
print("together they are text:", len("".join(pieces)) > 0)

# %% [markdown]
# ## A mistake is answered in words
#
# The server's own words, with method, address and status.

# %% tags=["nbval-check-output"]
from glm5lab.serving.client import ClientError

try:
    client.completion("GLM-5 is", max_tokens=10**6)
except ClientError as error:
    print("status:", error.status)
print("still healthy:", client.healthy())

# %% [markdown]
# ## Stop
#
# First SIGINT, as Ctrl-C; whatever does not end by itself is ended. Nothing of the server's process group is left.

# %% tags=["nbval-check-output"]
from glm5lab.serving.leash import members

running = len(members(server.group))
server.stop()
print("processes while it ran: more than one:", running > 1)
print("processes left:", len(members(server.group)))
print("healthy:", client.healthy())
workspace.cleanup()
