"""The tensors that a GLM-5 file has to hold, with their shapes, from its configuration."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import fields
from typing import Any

from glm5lab.architecture import FULL, Glm5Architecture
from glm5lab.gguf.shapes import Shape, block_shapes, outside_shapes, role_shapes
from glm5lab.loading.names import INSTEAD_OF


def expected_shapes(
    config: Mapping[str, Any], present: Collection[str] = (), layers: Iterable[int] | None = None
) -> dict[str, Shape]:
    """Every GGUF tensor that GLM-5 needs, with its shape, the MTP block left out.

    Args:
        config: the model's HF configuration.
        present: names in the file; where a fused tensor is among them it takes the place of the
            two that it holds.
        layers: the blocks in question; None for all.
    """
    arch = _architecture(config)
    shapes, expected = role_shapes(arch), outside_shapes(arch)
    for layer in range(arch.num_hidden_layers) if layers is None else layers:
        block = block_shapes(arch, layer)
        for role, replaced in INSTEAD_OF.items():
            if f"blk.{layer}.{role}" in present and replaced[0] in block:
                block = {r: s for r, s in block.items() if r not in replaced}
                block[role] = shapes[role]
        expected |= {f"blk.{layer}.{role}": shape for role, shape in block.items()}
    return expected


def _architecture(config: Mapping[str, Any]) -> Glm5Architecture:
    """The dimensions in HF's configuration, whose fields have the same names."""
    types = config.get("indexer_types") or (FULL,) * config["num_hidden_layers"]
    given = {f.name: config[f.name] for f in fields(Glm5Architecture) if f.name in config}
    return Glm5Architecture(**given | {"indexer_types": tuple(types)})
