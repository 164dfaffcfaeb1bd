"""Layer 2, the names: every tensor of the file reaches exactly one vLLM parameter.

`names` holds the one table (`mtp` that of the prediction block), `transforms` the changes to values
on the way, `reconcile` what does not fit, `prepare` the files that vLLM wants beside the weights,
`opened` a folder of them, read once a process.
`loader` is vLLM's model loader: `destinations` says what a rank takes, `streaming` brings it there,
`audit` proves that nothing was left out, `ranks` lets all ranks know, `report` writes it down.
"""
