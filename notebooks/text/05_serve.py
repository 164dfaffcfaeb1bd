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
# Does the file answer requests, as an OpenAI endpoint, and when a start fails, why? A server fails minutes after its start with the
# cause far up in the log of a worker, and a stopped one can leave workers behind that keep the GPU's memory.
#
# On the command line: `glm5lab serve FILE`, `glm5lab doctor LOG`, `glm5lab bench server URL`.

# %%
import os

from glm5lab.serving.server import Server, ServerError
from glm5lab.views.source import choose_file

source = choose_file()
os.environ["GLM5LAB_CACHE"] = str(source.folder / "cache")

# %% [markdown]
# ## What a failing start says
#
# A start that cannot work: 4 KiB for the cache, as where the weights leave no room. The last error in vLLM's log is that of a parent
# which saw its child end, and the cause is somewhere above it.

# %%
log = source.folder / "failing.log"
options = ["--served-model-name", "tiny-glm5"]
no_room = [*options, "--kv-cache-memory-bytes", "4096"]
failing = Server.of_file(source.file, options=no_room, log=log)
try:
    failing.start()
    failing.wait_ready(timeout_s=240)
except ServerError:
    lines = log.read_text().splitlines()
    errors = [number for number, line in enumerate(lines, 1) if "Error: " in line]
    print(f"{len(lines)} lines, the last error in line {errors[-1]}:")
    print(lines[errors[-1] - 1])
finally:
    failing.stop()

# %% [markdown]
# ## The cause, and the remedy
#
# The doctor reads the whole log, of all processes, and tells what came first from what only followed.

# %% tags=["nbval-check-output"]
from glm5lab.serving.doctor import examine

found = examine([str(log)])
print(found.verdict, "|", found.layer, "|", found.stage)
print("cause:", found.cause)

# %%
import sys

from glm5lab.views.doctor import doctor_text

text = doctor_text(found, width=110).replace(str(source.folder), "FOLDER")
print(text.replace(sys.base_prefix, "PYTHON"))

# %% [markdown]
# ## A start that works
#
# A free port on 127.0.0.1; options go on to vLLM as they are. vLLM's output goes to a log file. If the server cannot start,
# `wait_ready` raises with the doctor's verdict.

# %%
server = Server.of_file(source.file, options=options, log=source.folder / "server.log")
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
# ## The proof: it answers
#
# A completion, and a chat that comes piece by piece while it is generated. The sample's weights are random, so the answers say
# nothing sensible; that they come is the point.

# %%
from glm5lab.views.live_server import Meter

settings = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
question = [{"role": "user", "content": "Which layers does a served GLM-5 have?"}]
with Meter(client) as meter:
    completion = client.completion("GLM-5 is", **settings)
    pieces = list(client.stream_chat(question, **settings))
print("completion:", repr(completion))
print("chat:      ", repr("".join(pieces)))

# %% tags=["nbval-check-output"]
print("the completion has text:", len(completion) > 0)
print("the chat came in more than one piece:", len(pieces) > 1)
print("together they are text:", len("".join(pieces)) > 0)

# %% [markdown]
# What the engine counted during these two requests. In JupyterLab there is a chat box above it, whose answer comes in while the line
# grows; below the answer stand requests that run and wait, how full the cache is, and the time to the first piece.

# %% tags=["figure"]
from glm5lab.views.live_server import chat_explorer

chat_explorer(client, meter.samples, **settings)

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
# First SIGINT, as Ctrl-C; whatever does not end by itself is ended. Nothing of the server's process group is left. In JupyterLab the
# server goes on for the chat box: `stop_server()` in a cell of its own ends it, and so does shutting down the kernel.

# %% tags=["nbval-check-output"]
from glm5lab.serving.leash import members
from glm5lab.views.live import is_live


def stop_server():
    running = len(members(server.group))
    server.stop()
    print("processes while it ran: more than one:", running > 1)
    print("processes left:", len(members(server.group)))
    print("healthy:", client.healthy())


if not is_live():
    stop_server()

# %% [markdown]
# ## With your own file
#
# `glm5lab serve FILE` plans, starts and watches it; `glm5lab bench server URL` measures it with vLLM's own benchmark.

# %%
source.close()
