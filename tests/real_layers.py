"""A dense layer and a layer of experts: their file, their loading, their output.

    python real_layers.py FOLDER ARCHITECTURE OPTIONS

ARCHITECTURE are fields of Glm5Architecture, OPTIONS are vLLM's, both as JSON. Rows of a matrix
repeat after a prime number of them, one further for each expert, so that little work makes a large
file and says what comes out. Prints one line of JSON: errors of the layers' outputs for few and for
many tokens, bytes, seconds.
"""

import contextlib
import json
import os
import resource
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from packed import numbers, random_blocks, relative_error
from torch.nn import functional

from glm5lab.architecture import FULL, Glm5Architecture
from glm5lab.gguf.config import hf_config
from glm5lab.gguf.layouts import type_size
from glm5lab.gguf.placement import placements
from glm5lab.gguf.quantize_rules import quantized_type
from glm5lab.gguf.reader import GgufModel, open_gguf
from glm5lab.gguf.sample import add_metadata
from glm5lab.gguf.sample_tokenizer import sample_vocabulary
from glm5lab.gguf.shapes import tensor_shapes
from glm5lab.gguf.tensors import Tensor, type_sizes
from glm5lab.gguf.writing import SparseTensor, write_sparse_files
from glm5lab.kernel_bench.gguf_weights import plain_read

PERIOD = 509
DENSE, EXPERTS = 0, 1  # layers
TOKENS = (8, 128)
GAP = 2e-3  # between the last expert that is chosen and the next one, of tokens that are compared


def architecture(**fields: Any) -> Glm5Architecture:
    """GLM-5 with two layers, no prediction block and the sample's vocabulary."""
    sizes = {"num_hidden_layers": 2, "num_nextn_predict_layers": 0, "first_k_dense_replace": 1}
    types = {"indexer_types": (FULL,) * 2, "vocab_size": 512}
    return Glm5Architecture(**{**sizes, **types, **fields})


def write_layers(folder: Path, arch: Glm5Architecture) -> Path:
    """A file of these layers: Q4_K, down projections in Q6_K, the rest as llama-quantize has it."""
    tensors = []
    for name, shape in tensor_shapes(arch).items():
        kind = quantized_type(name, shape, arch.block_count, "q4_k_m")
        if ".ffn_" in name and len(shape) > 1 and "gate_inp" not in name:
            kind = 14 if "down" in name else 12
        tensors.append(SparseTensor(name, shape, *type_size(type_sizes()[kind][0], shape)))

    def add_keys(writer: Any) -> None:
        add_metadata(writer, arch, "q4_k_m", sample_vocabulary(arch.vocab_size))

    path = write_sparse_files(folder, "layers", [tensors], add_keys)
    with path.open("r+b") as file:
        for tensor in open_gguf(path).tensors.values():
            file.seek(tensor.offset)
            for part in bytes_of(tensor):
                file.write(part)
    return path


def base_of(tensor: Tensor) -> torch.Tensor:
    """The rows of a matrix that repeat: blocks, or float32 numbers."""
    seed, columns = zlib.crc32(tensor.name.encode()), tensor.shape[-1]
    rows = min(PERIOD, tensor.shape[-2] if len(tensor.shape) > 1 else 1)
    if tensor.type == "F32":
        scale = 0.01 if "bias" in tensor.name else 0.02
        return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * scale
    return random_blocks(tensor.type, (rows, columns), seed)


def bytes_of(tensor: Tensor) -> Any:
    """A tensor's bytes, a matrix at a time."""
    base = base_of(tensor).numpy()
    stack = tensor.shape[0] if len(tensor.shape) > 2 else 1
    rows = np.arange(tensor.shape[-2] if len(tensor.shape) > 1 else 1)
    for number in range(stack):
        yield base[(rows - number) % len(base)].tobytes()


class Reference:
    """The layers' outputs in float64.

    Args:
        model: the file.
        dtype: of plain numbers in the engine.
    """

    def __init__(self, model: GgufModel, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype
        self.arch = Glm5Architecture.from_metadata(model.metadata)
        self._bases: dict[str, torch.Tensor] = {}

    def matrix(self, x: torch.Tensor, name: str, expert: int = 0) -> torch.Tensor:
        """x times a matrix, transposed."""
        tensor = self.model.tensors[name]
        if name not in self._bases:
            base = base_of(tensor)
            plain = tensor.type == "F32"
            values = base.to(self.dtype).double() if plain else numbers(base, tensor.type)
            self._bases[name] = values
        product = x @ self._bases[name].T
        return product[:, (torch.arange(tensor.shape[-2]) - expert) % product.shape[1]]

    def gated(self, x: torch.Tensor, layer: int, suffix: str = "", expert: int = 0) -> torch.Tensor:
        """A gated feed-forward of the file."""
        names = [f"blk.{layer}.ffn_{part}{suffix}.weight" for part in ("gate", "up", "down")]
        gate, up = (self.matrix(x, name, expert) for name in names[:2])
        return self.matrix(functional.silu(gate) * up, names[2], expert)

    def experts(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The layer of experts, and which tokens' choice of them is clear."""
        arch, prefix = self.arch, f"blk.{EXPERTS}"
        scores = self.matrix(x, f"{prefix}.ffn_gate_inp.weight").sigmoid()
        bias = base_of(self.model.tensors[f"{prefix}.exp_probs_b.bias"])[0].double()
        k = arch.num_experts_per_tok
        best = (scores + bias).topk(k + 1, dim=1)
        clear = best.values[:, k - 1] - best.values[:, k] > GAP
        chosen = best.indices[:, :k]
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True) * arch.routed_scaling_factor
        out = self.gated(x, EXPERTS, "_shexp")
        for token, (ids, some) in enumerate(zip(chosen.tolist(), weights, strict=True)):
            for expert, weight in zip(ids, some, strict=True):
                row = self.gated(x[token : token + 1], EXPERTS, "_exps", expert)
                out[token] += weight * row[0]
        return out, clear


def errors_of(llm: Any, file: Path, dtype: torch.dtype) -> dict[str, float]:
    """Relative errors of both layers' outputs, for few and for many tokens."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    config, reference = llm.llm_engine.vllm_config, Reference(open_gguf(file), dtype)

    def outputs(model: Any) -> list[tuple[torch.Tensor, ...]]:
        found = []
        device = next(model.parameters()).device
        for count in TOKENS:
            x = torch.randn(count, reference.arch.hidden_size).to(dtype)
            layers = [model.model.layers[layer].mlp for layer in (DENSE, EXPERTS)]
            context = set_forward_context(None, config, num_tokens=count)
            with torch.inference_mode(), set_current_vllm_config(config), context:
                found.append((x, *(mlp(x.to(device)).cpu() for mlp in layers)))
        return found

    errors = {}
    for x, dense, experts in llm.apply_model(outputs)[0]:
        expected, clear = reference.experts(x.double())
        assert clear.float().mean() > 0.3
        errors[f"dense, {len(x)} tokens"] = error(dense, reference.gated(x.double(), DENSE))
        errors[f"experts, {len(x)} tokens"] = error(experts[clear], expected[clear])
    return errors


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    assert torch.isfinite(found).all()
    return relative_error(found, expected)


def watch_loading(figures: dict[str, Any]) -> None:
    """Note how much the process grows while weights load, and what a GPU holds then."""
    from glm5lab.loading import loader

    its_class: Any = loader.GgufModelLoader
    original = its_class.load_weights

    def load_weights(self: Any, model: Any, config: Any) -> None:
        # Where the peak cannot be set back, an earlier one counts too: a bound from above.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        before = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
        original(self, model, config)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        figures["host_bytes"] = peak - before
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            figures["gpu_bytes"] = torch.cuda.memory_allocated()

    its_class.load_weights = load_weights


def main(folder: Path, arch: Glm5Architecture, options: dict[str, Any]) -> dict[str, Any]:
    """Write, load, compare."""
    file = next(folder.glob("layers.gguf"), None) or write_layers(folder, arch)
    figures: dict[str, Any] = {"file_bytes": file.stat().st_size}
    plain_read(file, 1)  # into the page cache, should it not be there
    for earlier in folder.glob("load*.json"):
        earlier.unlink()
    os.environ["GLM5LAB_LOAD_REPORT"] = str(folder / "load.json")
    watch_loading(figures)
    from vllm import LLM

    llm = LLM(model=str(file), **options)
    figures["read_s"] = {threads: plain_read(file, threads) for threads in (1, 4)}
    loads = [json.loads(path.read_text()) for path in sorted(folder.glob("load*.json"))]
    for name in ("bytes_read", "seconds", "parameter_bytes"):
        figures[name] = [load[name] for load in loads]
    ranks = options.get("tensor_parallel_size", 1)
    model = open_gguf(file)
    planned = placements(model, {**hf_config(model), "dtype": options["dtype"]}, ranks)
    figures["planned_bytes"] = sum(place.loaded for place in planned.values())
    if ranks == 1:
        figures["errors"] = errors_of(llm, file, getattr(torch, options["dtype"]))
    return figures


if __name__ == "__main__":
    target, fields, settings = sys.argv[1:]
    arch = architecture(**json.loads(fields))
    print("FIGURES", json.dumps(main(Path(target), arch, json.loads(settings))), flush=True)
