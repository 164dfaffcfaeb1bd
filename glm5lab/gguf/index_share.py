"""Which layers run an indexer of their own, from the three places where a file says so.

1. `attention.indexer.types`: true = full, one a decoder layer. Decides where it is present.
2. llama.cpp's rule where that key is absent: contexts below 1,048,576 are GLM-5 and 5.1, all full;
   longer ones are GLM-5.2, full at 0, 1, 2, 6, 10, ... (src/models/glm-dsa.cpp, commit 06e514f).
3. The layers that hold indexer tensors. Where 2 asks for an indexer that the file does not hold,
   this decides; llama.cpp would crash on such a file.

Files with tensors on every layer occur of GLM-5.2, too: those of shared layers are copies.
"""

from dataclasses import dataclass

from glm5lab.architecture import FULL, SHARED, Glm5Architecture, indexer_types
from glm5lab.gguf.layer_ranges import layer_ranges
from glm5lab.gguf.reader import GgufModel

KEY, RULE, TENSORS = "attention.indexer.types", "context rule", "indexer tensors"
ROLES = frozenset(
    f"indexer.{name}"
    for name in ("attn_q_b.weight", "attn_k.weight", "k_norm.weight", "k_norm.bias", "proj.weight")
)


@dataclass(frozen=True)
class IndexShare:
    """Which layers select for themselves.

    Attributes:
        types: "full" or "shared", one a decoder layer.
        sources: which of KEY, RULE and TENSORS say exactly this; the first one decided.
        conflicts: a sentence for each that says something else.
        notes: what is unusual but harmless.
    """

    types: tuple[str, ...]
    sources: tuple[str, ...]
    conflicts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def full_layers(self) -> list[int]:
        """Layers with an indexer of their own."""
        return [i for i, kind in enumerate(self.types) if kind == FULL]


def index_share(model: GgufModel, arch: Glm5Architecture) -> IndexShare:
    """The types of a file's layers, and whether its three statements agree.

    Args:
        model: its metadata and tensor names.
        arch: its dimensions; `arch.indexer_types` is what KEY or else RULE says.
    """
    layers, context = arch.num_hidden_layers, arch.max_position_embeddings
    stated, rule = arch.indexer_types, indexer_types(None, layers, context)
    has_key = model.metadata.get(f"glm-dsa.{KEY}") is not None
    holders, partial = _holders(model, layers)
    full = {i for i, kind in enumerate(stated) if kind == FULL}
    conflicts, notes = list(partial), []
    types, first = stated, KEY if has_key else RULE
    absent, copies = sorted(full - holders), sorted(holders - full)
    if has_key and rule != stated and SHARED in rule:
        conflicts.append(f"{KEY} differs from GLM-5.2's pattern, which a context of {context} "
                         f"tokens has; {KEY} decides")  # fmt: skip
    if absent and holders:
        what = f"{first} says full for {_blocks(absent)}, where the file has no indexer tensors"
        if has_key or 0 not in holders:
            conflicts.append(f"{what}; the file is incomplete, or {first} is wrong")
        else:
            conflicts.append(f"{what}; the tensors decide: those layers are taken for shared")
            types = tuple(FULL if i in holders else SHARED for i in range(layers))
            first = TENSORS
    if copies and first != TENSORS:
        notes.append(f"{_blocks(copies)} share their indices but hold indexer tensors, too "
                     "(copies in many GLM-5.2 files): not loaded")  # fmt: skip
    agree = {KEY: has_key and stated == types, RULE: rule == types,
             TENSORS: holders == {i for i, kind in enumerate(types) if kind == FULL}}  # fmt: skip
    rest = [name for name, same in agree.items() if same and name != first]
    return IndexShare(types, (first, *rest), tuple(conflicts), tuple(notes))


def describe(share: IndexShare) -> list[str]:
    """Sentences for a report; none for a file whose layers all are full and that agrees."""
    out = []
    if SHARED in share.types:
        full = share.full_layers
        out.append(
            f"IndexShare: {len(full)} of {len(share.types)} layers select for themselves "
            f"({layer_ranges(full)}), by {', '.join(share.sources)}"
        )
    out += [f"IndexShare conflict: {text}" for text in share.conflicts]
    return out + [f"IndexShare: {text}" for text in share.notes]


def _blocks(numbers: list[int]) -> str:
    return f"block{'s' if len(numbers) > 1 else ''} {layer_ranges(numbers)}"


def _holders(model: GgufModel, layers: int) -> tuple[set[int], list[str]]:
    """Decoder layers with indexer tensors, and a sentence for each that lacks some of them."""
    held: dict[int, set[str]] = {}
    for t in model.tensors.values():
        layer, role = t.layer, t.role
        if layer is not None and layer < layers and role in ROLES:
            held.setdefault(layer, set()).add(role)
    partial = [
        f"block {layer} holds {len(roles)} of {len(ROLES)} indexer tensors; "
        f"{', '.join(sorted(ROLES - roles))} missing"
        for layer, roles in sorted(held.items())
        if roles != ROLES
    ]
    return set(held), partial
