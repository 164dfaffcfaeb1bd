"""Which tensors stay quantized on a GPU, and which of vLLM's layers they belong to."""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

from glm5lab.errors import InputError
from glm5lab.gguf.kernels import DEQUANTIZED, UNQUANTIZED, is_packed
from glm5lab.gguf.parts import whole
from glm5lab.gguf.reader import GgufModel
from glm5lab.gguf.tensors import Tensor
from glm5lab.loading.mtp import mtp_mappings
from glm5lab.loading.opened import Opened

MIB = 1 << 20
BF16 = 2


def packable(tensor: Tensor) -> bool:
    """Whether a tensor's blocks are kept: a kernel multiplies them, and vLLM lets it."""
    return is_packed(tensor.type, tensor.role, len(tensor.shape))


def layer_tensors(found: Opened) -> dict[str, dict[str, Tensor]]:
    """For every layer its tensors, by part ("" for the only one, "0", "w1").

    Layers are named as vLLM names them while it builds them: the prediction block without
    `mtp_block`, experts without `routed_experts`.

    Raises:
        InputError: the file holds no complete GLM-5.
    """
    model, config = found.model, found.config
    mappings = found.complete.loaded
    if config.get("num_nextn_predict_layers"):
        mappings = mappings + _mtp(model, config)
    layers: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for mapping in mappings:
        path = mapping.vllm.rpartition(".")[0].removesuffix(".routed_experts")
        path = path.replace(".mtp_block.", ".").replace(".shared_head.head", ".head")
        layers[path].setdefault(mapping.part, model.tensors[mapping.gguf])
    return dict(layers)


def _mtp(model: GgufModel, config: Mapping[str, Any]) -> list[Any]:
    """The prediction block's mappings; none where it is incomplete, which its own load reports."""
    try:
        return [m for m in mtp_mappings(model, config) if not m.dropped]
    except InputError:
        return []


def log_unpacked(layers: Mapping[str, Mapping[str, Tensor]], log: Callable[[str], object]) -> None:
    """Say which quantized tensors no kernel takes, and what it costs to keep them as numbers."""
    by_type: dict[str, list[Tensor]] = defaultdict(list)
    for parts in layers.values():
        for tensor in parts.values():
            needed = tensor.role.removesuffix(".weight") in DEQUANTIZED
            if not packable(tensor) and not needed and tensor.type not in UNQUANTIZED:
                by_type[tensor.type].append(tensor)
    for kind, tensors in by_type.items():
        packed = sum(tensor.nbytes for tensor in tensors) / MIB
        plain = sum(whole(tensor).elements for tensor in tensors) * BF16 / MIB
        log(
            f"No kernel multiplies {kind}: {len(tensors)} tensors such as {tensors[0].name} are "
            f"dequantized while loading and take {plain:,.0f} MiB instead of {packed:,.0f} MiB, "
            "on all ranks together."
        )
