"""A random GLM-5-shaped model for one GPU: real attention, small everything else.

Eight heads are one GPU's share at TP8. Latent, rotary and head widths, the indexer and its top-k
are GLM-5's own; experts, inner widths and vocabulary are cut down.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from glm5lab.architecture import FULL, SHARED, Glm5Architecture
from glm5lab.errors import InputError
from glm5lab.gguf.sample_hf import twin_config
from glm5lab.gguf.sample_weights import centre, hf_shapes, scale

WEIGHTS, CONFIG = "model.safetensors", "config.json"
KINDS = ("full", "share", "flash")
SEED = 5
POOL = 16  # keys that GLM-5.3-Flash's indexer scores as one
DESCRIPTION = (
    "random weights, 4 layers (2 dense, 2 with 16 experts) and MTP, 8 heads, hidden 6144, top-k "
    f"2048; GLM-5.3-Flash: the same with rows of 512, keys in pools of {POOL}, no MTP"
)


def architecture(kind: str, layers: int = 4) -> Glm5Architecture:
    """Dimensions: half of the layers dense, the others with experts, and one MTP layer.

    Args:
        kind: "full" (an indexer a layer), "share" (every second layer reuses a selection), or
            "flash" (GLM-5.3-Flash's attention: no rotary part, rows of 512; no MTP).
        layers: decoder layers.
    """
    if kind not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}, got {kind!r}")
    types = (FULL, SHARED) if kind == "share" else (FULL, FULL)
    glm5 = Glm5Architecture.glm5()
    if kind == "flash":
        glm5 = replace(
            glm5,
            qk_nope_head_dim=256,
            qk_rope_head_dim=0,
            num_nextn_predict_layers=0,
        )
    return replace(
        glm5,
        num_hidden_layers=layers,
        num_attention_heads=8,
        n_routed_experts=16,
        num_experts_per_tok=4,
        moe_intermediate_size=256,
        intermediate_size=1536,
        first_k_dense_replace=layers // 2,
        vocab_size=16384,
        indexer_types=tuple(types[layer % 2] for layer in range(layers)),
        rms_norm_eps=1e-6,
    )


def shapes_of(arch: Glm5Architecture, kind: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the checkpoint's tensors."""
    shapes = hf_shapes(arch)
    if kind == "flash":
        for layer in range(arch.num_hidden_layers):
            prefix = f"model.layers.{layer}.self_attn.indexer.index_kpool_compress"
            shapes[f"{prefix}_ape"] = (POOL, arch.index_head_dim)
            shapes[f"{prefix}_gate"] = (arch.index_head_dim, arch.hidden_size)
    return shapes


def config_of(arch: Glm5Architecture, kind: str) -> dict[str, Any]:
    """Content of config.json.

    GLM-5.3-Flash's linear attention and parallel residual streams are left out: what is asked
    about is its sparse attention.
    """
    config = twin_config(arch) | {"dtype": "bfloat16"}
    if kind != "flash":
        return config
    dense = arch.first_k_dense_replace
    sparse = arch.num_hidden_layers - dense
    del config["rope_parameters"], config["index_topk_pattern"]
    return config | {
        "architectures": ["Glm5NextForCausalLM"],
        "model_type": "glm5_next_text",
        "layer_types": ["indexed_attention"] * arch.num_hidden_layers,
        "mlp_layer_types": ["dense"] * dense + ["sparse"] * sparse,
        "linear_num_heads": 8,  # none is there, but vLLM sizes its pages for them
        "index_kpool": POOL,
        "index_kpool_always_select_tail": True,
        "mla_use_nope": True,
        "mhc": False,
        "swiglu_limit": 10.0,
    }


def write_model(folder: Path, kind: str, layers: int = 4, device: str = "cuda") -> Path:
    """Write config.json and bfloat16 weights; a model that is already there is taken as it is.

    The weights depend on kind, layers and the kind of device alone. Logits have a standard
    deviation of about 1. They are written beside the folder, which is there once it is whole.

    Raises:
        InputError: the folder is there and holds something else.
    """
    if (folder / CONFIG).is_file():
        return folder
    made = folder.with_name(f"{folder.name}.partial")
    if made.exists():
        shutil.rmtree(made)
    clear(folder)
    made.mkdir(parents=True)
    write_files(made, kind, layers, device)
    made.rename(folder)
    return folder


def clear(folder: Path) -> None:
    """Remove what a run that wrote into the folder itself has left there, and nothing else.

    Raises:
        InputError: the folder holds something else.
    """
    if not folder.exists():
        return
    others = sorted(file.name for file in folder.iterdir() if file.name not in (WEIGHTS, CONFIG))
    if others:
        cause = f"holds {others[0]!r} and no whole model"
        raise InputError(folder, cause, "move it away, or give another --work")
    for name in (WEIGHTS, CONFIG):
        (folder / name).unlink(missing_ok=True)
    folder.rmdir()


def write_files(folder: Path, kind: str, layers: int, device: str) -> None:
    """Write the weights and config.json into a folder that is there; see `write_model`."""
    import torch
    from safetensors.torch import save_file

    arch = architecture(kind, layers)
    generator = torch.Generator(device).manual_seed(SEED)
    weights: dict[str, Any] = {}
    for name, shape in shapes_of(arch, kind).items():
        values = torch.randn(shape, generator=generator, device=device)
        values = values * float(scale(name, shape)) + float(centre(name))
        weights[name] = values.to(torch.bfloat16).cpu()
    # A safetensors file holds no tensor twice.
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    for layer in range(arch.num_hidden_layers, arch.block_count):
        weights[f"model.layers.{layer}.embed_tokens.weight"] = embedding.clone()
        weights[f"model.layers.{layer}.shared_head.head.weight"] = head.clone()
    save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})
    config = json.dumps(config_of(arch, kind), indent=2)
    (folder / CONFIG).write_text(config + "\n")
