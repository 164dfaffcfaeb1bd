"""Proof of layer 4 on a GPU: TRITON_MLA_SPARSE beside vLLM's own backends, in vLLM's engine.

Each engine runs in a child process on the same random model and prompts; the parent compares.
"""
