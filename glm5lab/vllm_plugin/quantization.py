"""Quantization "glm5lab": weights stay as the file's GGUF blocks; vLLM loads this module.

The file decides a layer's parameters while vLLM builds it: one parameter where all parts of a fused
layer have the same type, otherwise one each, so that types may differ, plain ones included. Each
layer tells the loader where its parts lie (`gguf_slots`).
"""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
)
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.platforms import current_platform

from glm5lab.gguf.tensors import Tensor
from glm5lab.loading.destinations import Slot
from glm5lab.loading.opened import opened
from glm5lab.loading.packing import layer_tensors, log_unpacked, packable
from glm5lab.vllm_plugin import QUANTIZATION, gguf_kernels
from glm5lab.vllm_plugin.gguf_parameters import Held, add_parameter, set_slots

logger = init_logger("vllm.glm5lab")


class Glm5QuantizationConfig(QuantizationConfig):
    """What each layer's tensors in the file make of it."""

    folder = ""

    def get_name(self) -> Any:
        return QUANTIZATION

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.half, torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return 75

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Glm5QuantizationConfig":
        return cls()

    def maybe_update_config(self, model_name: str, *_args: Any, **_kwargs: Any) -> None:
        self.folder = model_name

    @cached_property
    def layers(self) -> dict[str, dict[str, Tensor]]:
        """Layer, as vLLM names it while building -> part -> the tensor that fills it."""
        layers = layer_tensors(opened(self.folder))
        log_unpacked(layers, logger.warning)
        return layers

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        tensors = self.layers.get(prefix, {})
        packed = any(packable(tensor) for tensor in tensors.values())
        if isinstance(layer, LinearBase):
            return PackedLinearMethod(tensors) if packed else UnquantizedLinearMethod()
        if isinstance(layer, VocabParallelEmbedding):
            return PackedEmbeddingMethod(tensors) if packed else None
        if isinstance(layer, RoutedExperts):
            # vLLM's experts for CPUs do not know that some may be on another rank.
            cpu = current_platform.is_cpu()
            spread = layer.moe_config.moe_parallel_config.use_ep
            wanted = packed or (cpu and spread)
            return PackedExpertsMethod(layer.moe_config, tensors) if wanted else None
        return None


class PackedLinearMethod(LinearMethodBase):
    """A linear layer of which at least one part is kept as blocks.

    Args:
        tensors: part ("0", "1", or "" for the only one) -> the tensor that fills it.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = dict(sorted(tensors.items()))
        self.held: dict[str, Held] = {}  # by parameter

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        slots: dict[str, Slot] = {}
        rows = dict(zip(self.tensors, output_partition_sizes, strict=True))
        one = len({tensor.type for tensor in self.tensors.values()}) == 1
        # Where columns are divided this rank's begin behind those of the ranks before.
        divided = input_size_per_partition < input_size
        first = layer.tp_rank * input_size_per_partition if divided else 0
        at = 0
        for number, (part, tensor) in enumerate(self.tensors.items()):
            name = "weight" if one else f"weight_{number}"
            if not one or number == 0:
                height = sum(rows.values()) if one else rows[part]
                shape = (height, input_size_per_partition)
                self.held[name] = add_parameter(layer, name, tensor, shape, params_dtype, first)
            slots[part] = Slot(name, at if one else 0, rows[part], packable(tensor))
            at += rows[part]
        set_slots(layer, slots)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        flat = x.reshape(-1, x.shape[-1])
        found = []
        for name, held in self.held.items():
            weight = getattr(layer, name)
            if held.type_id is None:
                found.append(functional.linear(flat, weight))
            else:
                found.append(gguf_kernels.matmul(held.widened(flat), weight, held.type_id))
        out = found[0] if len(found) == 1 else torch.cat(found, dim=-1)
        out = out if bias is None else out + bias
        return out.view(*x.shape[:-1], out.shape[-1])


class PackedEmbeddingMethod(PackedLinearMethod):
    """A vocabulary kept as blocks: rows by number, or as lm_head's matrix."""

    def create_weights(self, layer: nn.Module, *args: Any, **kwargs: Any) -> None:
        self.dtype = kwargs.get("params_dtype") or args[-1]
        super().create_weights(layer, *args, **kwargs)

    def embedding(self, layer: nn.Module, input_: torch.Tensor) -> torch.Tensor:
        ((name, held),) = self.held.items()
        assert held.type_id is not None
        return gguf_kernels.embedding(input_, getattr(layer, name), held.type_id, self.dtype)


class PackedExpertsMethod(FusedMoEMethodBase):
    """Routed experts of which at least one projection is kept as blocks.

    Args:
        moe: vLLM's description of the layer.
        tensors: part (w1, w2, w3, or w1+w3) -> the stack that fills it.
    """

    def __init__(self, moe: Any, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(moe)
        self.tensors = dict(tensors)
        both = self.tensors.pop("w1+w3", None)
        if both is not None:
            self.tensors |= {"w1": both, "w3": both}
        self.held: dict[str, Held] = {}  # by parameter

    def maybe_roundup_sizes(
        self, hidden_size: int, intermediate_size_per_partition: int, *_args: Any
    ) -> tuple[int, int]:
        return hidden_size, intermediate_size_per_partition

    def create_weights(
        self,
        layer: nn.Module,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        width, gate, up = intermediate_size_per_partition, self.tensors["w1"], self.tensors["w3"]
        slots: dict[str, Slot] = {}

        def add(name: str, tensor: Tensor, rows: int, columns: int, first: int = 0) -> None:
            shape = (num_experts, rows, columns)
            self.held[name] = add_parameter(layer, name, tensor, shape, params_dtype, first)

        if gate.type == up.type:
            add("w13_weight", gate, 2 * width, hidden_size)
            slots["w1"] = Slot("w13_weight", 0, width, packable(gate))
            slots["w3"] = Slot("w13_weight", width, width, packable(up))
        else:
            for part, tensor in (("w1", gate), ("w3", up)):
                add(f"{part}_weight", tensor, width, hidden_size)
                slots[part] = Slot(f"{part}_weight", 0, width, packable(tensor))
        down = self.tensors["w2"]
        add("w2_weight", down, hidden_size, width, first=self.moe.tp_rank * width)
        slots["w2"] = Slot("w2_weight", 0, hidden_size, packable(down))
        set_slots(layer, slots)

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        return None

    def apply(
        self,
        layer: Any,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        shared_experts: Any = None,
        shared_experts_input: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if layer.activation != MoEActivation.SILU or layer.apply_router_weight_on_input:
            raise NotImplementedError(
                f"activation {layer.activation}, router weight on input "
                f"{layer.apply_router_weight_on_input}: expected silu and False, as GLM-5 has"
            )
        out = torch.empty_like(x)
        step = max(1, gguf_kernels.GRID // topk_ids.shape[1])
        for first in range(0, len(x), step):
            some = slice(first, first + step)
            out[some] = self._tokens(layer, x[some], topk_weights[some], topk_ids[some])
        return out

    def _tokens(
        self, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor
    ) -> torch.Tensor:
        """As many tokens as the kernels take at once."""
        routing = gguf_kernels.Routing(topk_ids, layer.global_num_experts, layer.expert_map)

        def product(values: torch.Tensor, name: str, shared: bool) -> torch.Tensor:
            weight, held = getattr(layer, name), self.held[name]
            values = held.widened(values)
            return gguf_kernels.expert_matmul(values, weight, held.type_id, routing, shared)

        if "w13_weight" in self.held:
            inner = silu_and_mul(product(x, "w13_weight", True))
        else:
            inner = functional.silu(product(x, "w1_weight", True)) * product(x, "w3_weight", True)
        down = product(inner, "w2_weight", False).view(*topk_ids.shape, x.shape[1])
        weights = torch.where(routing.here, topk_weights, 0.0)
        return down.mul_(weights.unsqueeze(-1)).sum(dim=1)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """SiLU of the first half of each row times the second half."""
    half = x.shape[-1] // 2
    if not x.is_cuda:
        return functional.silu(x[:, :half]) * x[:, half:]
    out = x.new_empty(x.shape[0], half)
    torch.ops._C.silu_and_mul(out, x)
    return out
