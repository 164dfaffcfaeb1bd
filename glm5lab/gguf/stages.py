"""Which decoder layers each pipeline stage holds, where vLLM's own division will not do."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from glm5lab.architecture import has_indexer
from glm5lab.gguf.placement import Placement, placements, stage_layers
from glm5lab.gguf.reader import GgufModel


def environment(partition: Sequence[int] | None) -> dict[str, str]:
    """The variable by which vLLM takes a division into stages; none for its own."""
    return {"VLLM_PP_LAYER_PARTITION": ",".join(map(str, partition))} if partition else {}


def shared_starts(config: Mapping[str, Any], stages: Sequence[range]) -> list[str]:
    """A sentence for each stage that begins at a layer without a top-k of its own."""
    return [
        f"stage {number} begins at layer {layers[0]}, which shares the top-k of a layer "
        "on the stage before"
        for number, layers in enumerate(stages)
        if not has_indexer(config, layers[0])
    ]


def needed_partition(
    model: GgufModel,
    config: Mapping[str, Any],
    tp: int,
    pp: int,
    gpu: bool,
    expert_parallel: bool = False,
) -> tuple[int, ...] | None:
    """Layers a stage where vLLM's own division begins one at a layer that shares its top-k.

    Returns:
        None where vLLM's division will do, and where none does.
    """
    layers = config["num_hidden_layers"]
    if not 1 < pp <= layers or not shared_starts(config, stage_layers(layers, pp)):
        return None
    placed = placements(model, config, tp, pp, gpu, expert_parallel)
    return balanced_partition(config, placed, model, pp)


def balanced_partition(
    config: Mapping[str, Any], placed: Mapping[str, Placement], model: GgufModel, pp: int
) -> tuple[int, ...] | None:
    """Layers a stage such that the fullest stage is as small as can be.

    Stages begin only at layers that choose their own top-k: vLLM hands on hidden states, and no
    top-k, from stage to stage.

    Returns:
        Counts of layers, or None where there are not enough places to cut.
    """
    layers = config["num_hidden_layers"]
    sizes = [0] * layers
    for name, placement in placed.items():
        if placement.stage >= 0:
            layer = model.tensors[name].layer
            # The embedding sits on the first stage, norm and output on the last.
            outside = 0 if placement.stage == 0 else layers - 1
            sizes[outside if layer is None else layer] += placement.loaded
    below = [0, *accumulate(sizes)]
    starts = [n for n in range(layers) if has_indexer(config, n)]
    # best[start]: bytes of the fullest stage, then evenness, then layers a stage, from `start` on.
    last = {start: [layers] for start in starts}
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {}
    for stage in range(pp):
        reach = (
            last if stage == 0 else {s: [n for n in starts if n > s and n in best] for s in starts}
        )
        found = {}
        for start, ends in reach.items():
            ways = []
            for end in ends:
                size = below[end] - below[start]
                fullest, squares, counts = best[end] if stage else (0, 0, ())
                ways.append((max(size, fullest), squares + size**2, (end - start, *counts)))
            if ways:
                found[start] = min(ways)
        best = found
    return best[0][2] if 0 in best else None
