"""glm5lab: run GLM-5 from GGUF files in vLLM, and prove every layer of it.

Importing this package loads neither torch nor vLLM; see `glm5lab --help` for the commands.
"""

__version__ = "0.1.0"
