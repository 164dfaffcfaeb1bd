"""One rank loads its part of a model, without the other ranks and without an engine.

    python vllm_load.py FILE TP PP RANK EXPERT_PARALLEL OPTIONS

OPTIONS are EngineArgs as JSON; among them "draft" loads the model of multi-token prediction, and
"rank0" makes the rank take rank 0's share. Then vLLM's own weight loaders, which are given whole
tensors, fill the same model again, one of plain numbers where the first has GGUF blocks. Prints one
line of JSON: the parameters that differ, the boxes taken of each tensor.
"""

import json
import sys
from typing import Any

import torch
import vllm_rank

from glm5lab.loading import destinations, opened, transforms
from glm5lab.loading import loader as loader_module
from glm5lab.loading.ranks import Ranks
from glm5lab.vllm_plugin import gguf_kernels

loader: Any = loader_module


def share_of_rank_0(self: Any, total: range, local: int, rank: int) -> range:
    """The mistake of which the plugin's issue 103 tells."""
    return total[:local]


def counted(module: Any, name: str) -> list[Any]:
    """Grows by one with each call of a module's function from now on."""
    calls: list[Any] = []
    original = getattr(module, name)

    def noted(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    setattr(module, name, noted)
    return calls


def poison(model: torch.nn.Module) -> None:
    """Nothing may look filled before it is."""
    for parameter in model.parameters():
        parameter.data.fill_(float("nan") if parameter.is_floating_point() else 0xAA)


def load(file: str, *numbers: str, options: dict[str, Any]) -> dict[str, Any]:
    """Build, fill, compare; what the rank took."""
    tp, pp, rank, expert_parallel = map(int, numbers)
    draft = options.pop("draft", False)
    if options.pop("rank0", False):
        place: Any = destinations._Place
        place._share = share_of_rank_0
    if draft:
        options["speculative_config"] = {"method": "mtp", "num_speculative_tokens": 1}
    opens = counted(opened, "open_prepared")
    model: Any
    model, config = vllm_rank.build(
        file, tp, pp, rank, bool(expert_parallel), device="cpu", draft=draft, **options
    )
    poison(model)
    taken: dict[str, Any] = {}

    def not_taken(ranks: Any, tensors: Any) -> list[str]:
        """The other ranks are not here: the test compares."""
        taken["boxes"], taken["tensors"] = ranks[0], [tensor.name for tensor in tensors]
        return []

    def run(self: Any) -> None:
        taken["load"] = self
        original(self)

    original = loader._Load.run
    loader._Load.run = run
    loader.not_taken = not_taken
    loader.ranks_of = lambda members, what: Ranks(None)
    loader.GgufModelLoader(config.load_config).load_weights(model, config.model_config)
    taken["parameters"] = len(dict(model.named_parameters()))
    taken["packed"] = sum(p.dtype == torch.uint8 for p in model.parameters())
    taken["opened"] = len(opens)
    taken["sizes"] = {n: p.numel() * p.element_size() for n, p in model.named_parameters()}
    its = taken.pop("load")
    ours = in_numbers(model, its.gguf)
    if taken["packed"]:
        config.model_config.quantization = config.quant_config = None
        config.compilation_config.static_forward_context.clear()
        model = vllm_rank.initialize(config, "cpu", draft)
    poison(model)
    model.load_weights(transforms.hf_weights(its.gguf, its._mappings()))
    taken["different"] = [n for n, p in model.named_parameters() if not torch.equal(p, ours[n])]
    return taken


def in_numbers(model: torch.nn.Module, gguf: Any) -> dict[str, torch.Tensor]:
    """The model's parameters by the names that they have without GGUF blocks."""
    found = {name: p.detach().clone() for name, p in model.named_parameters()}
    for path, module in model.named_modules():
        slots = getattr(module, "gguf_slots", None)
        if slots is None:
            continue
        parts = {}
        method = module.quant_method
        for part, slot in sorted(slots.items()):
            held = found[f"{path}.{slot.parameter}"].narrow(-2, slot.row, slot.rows)
            kept = method.held[slot.parameter]
            if kept.type_id is not None:
                rows = held.reshape(-1, held.shape[-1])
                flat = gguf_kernels.dequantize(rows, kept.type_id, torch.float32)
                held = flat[:, kept.before : flat.shape[1] - kept.behind].view(*held.shape[:-1], -1)
            parts[part] = held
        if "w2" in parts:
            found[f"{path}.w2_weight"] = parts["w2"]
            found[f"{path}.w13_weight"] = torch.cat([parts["w1"], parts["w3"]], dim=1)
        else:
            found[f"{path}.weight"] = torch.cat(list(parts.values()))
    return found


if __name__ == "__main__":
    *arguments, text = sys.argv[1:]
    print("TAKEN", json.dumps(load(*arguments, options=json.loads(text))), flush=True)
