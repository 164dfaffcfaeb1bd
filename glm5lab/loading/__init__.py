"""Layer 2, the names: every tensor of the file reaches exactly one vLLM parameter.

`names` holds the one table, `transforms` the changes to values on the way, `reconcile` what does
not fit, `prepare` the files that vLLM wants beside the weights, `loader` vLLM's model loader.
"""
