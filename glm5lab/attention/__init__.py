"""Layer 3, the kernels: sparse multi-head latent attention and the lightning indexer.

`reference` states every operation in plain PyTorch; the modules beside it hold Triton kernels of
the same signatures. `implementation` chooses between the two.
"""

import os
from collections.abc import Callable
from typing import Any

SparseMLA = Callable[..., Any]
StoreRows = Callable[..., None]
DEVICE_TYPES = ("cpu", "cuda")  # as torch.device.type names them


def triton_interpreted() -> bool:
    """Whether Triton kernels are asked to run in Triton's CPU interpreter (TRITON_INTERPRET=1)."""
    return os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")


def implementation_name(device_type: str) -> str:
    """Which sparse-MLA implementation serves a device: "triton" or "reference".

    Triton runs on GPUs, and on CPUs only in its interpreter (TRITON_INTERPRET=1), which is far
    slower than the reference and meant for testing the kernel inside the engine.

    Raises:
        ValueError: a device type that is none of DEVICE_TYPES.
    """
    if device_type not in DEVICE_TYPES:
        known = " or ".join(f'"{name}"' for name in DEVICE_TYPES)
        raise ValueError(f"device_type: expected {known}, got {device_type!r}")
    return "triton" if device_type != "cpu" or triton_interpreted() else "reference"


def implementation(device_type: str) -> SparseMLA:
    """The `sparse_mla` function for a device type ("cpu", "cuda"); see `reference.sparse_mla`."""
    if implementation_name(device_type) == "triton":
        from glm5lab.attention.sparse_mla import sparse_mla as triton_sparse_mla

        return triton_sparse_mla
    from glm5lab.attention.reference import sparse_mla

    return sparse_mla


def store_implementation(device_type: str) -> StoreRows:
    """The `store_rows` function for a device type; see `row_formats.store_rows`."""
    if implementation_name(device_type) == "triton":
        from glm5lab.attention.kv_cache import store_rows as triton_store_rows

        return triton_store_rows
    from glm5lab.attention.row_formats import store_rows

    return store_rows


def index_store_implementation(device_type: str) -> StoreRows:
    """The `store_index_keys` function for a device type; see `row_formats.store_index_keys`."""
    if implementation_name(device_type) == "triton":
        from glm5lab.attention.kv_cache import store_index_keys as triton_store_index_keys

        return triton_store_index_keys
    from glm5lab.attention.row_formats import store_index_keys

    return store_index_keys
