"""Plotly figures for notebooks: where a file's bytes are, and what a plan puts on each GPU."""

from collections import Counter
from collections.abc import Container
from typing import TYPE_CHECKING, Any

from glm5lab.gguf.memory import GIB, MIB
from glm5lab.gguf.reader import GgufModel, Tensor

if TYPE_CHECKING:
    import plotly.graph_objects as go

    from glm5lab.gguf.parallel import Card, Split
    from glm5lab.gguf.plan import Plan

# Okabe and Ito's palette: told apart by colour-blind readers too.
COLOURS = {
    "attention": "#0072B2",
    "indexer": "#D55E00",
    "routed experts": "#56B4E9",
    "dense and shared experts, router": "#009E73",
    "embedding, output, MTP": "#CC79A7",
}
PALETTE = ("#0072B2", "#56B4E9", "#009E73", "#F0E442", "#E69F00", "#D55E00", "#CC79A7", "#999999")
# Where there are more types than colours, a second round of them is hatched.
PATTERNS = ("", "/", "x", ".")
MEMORY = {
    "weights, quantized": "#0072B2",
    "weights, plain": "#56B4E9",
    "workspace (estimate)": "#E69F00",
    "left for the cache": "#009E73",
}


def memory_parts(split: "Split", card: "Card") -> tuple[float, ...]:
    """What fills a split's fullest rank, in GiB: a value for each key of MEMORY."""
    stage, space = split.fullest
    left = max(0, card.budget - stage.weights - space.total)
    return tuple(n / GIB for n in (stage.packed, stage.plain, space.total, left))


MOST_ROLES, MOST_SPLITS = 16, 8


def mtp_blocks(model: GgufModel) -> set[int | None]:
    """Blocks for multi-token prediction: those that hold its own tensors, whatever else."""
    return {tensor.layer for tensor in model.tensors.values() if tensor.role.startswith("nextn.")}


def part(tensor: Tensor, mtp: Container[int | None] = ()) -> str:
    """Which part of the model a tensor belongs to; a key of COLOURS.

    Args:
        tensor: any of a GLM-5.
        mtp: from `mtp_blocks`.
    """
    role = tensor.role
    if tensor.layer is None or tensor.layer in mtp:
        return "embedding, output, MTP"
    if role.startswith("indexer."):
        return "indexer"
    if role.startswith("attn_"):
        return "attention"
    return "routed experts" if "_exps." in role else "dense and shared experts, router"


def unit_of(largest: float) -> tuple[str, int]:
    """Name and bytes of the unit for an axis that reaches `largest` bytes."""
    return ("GiB", GIB) if largest >= 2 * GIB else ("MiB", MIB)


def bytes_figure(model: GgufModel) -> "go.Figure":
    """Stacked bars: bytes in the file, one bar a layer, one colour a part of the model."""
    import plotly.graph_objects as go

    sizes: Counter[tuple[str, int | None]] = Counter()
    layer_sizes: Counter[int | None] = Counter()
    mtp = mtp_blocks(model)
    for tensor in model.tensors.values():
        sizes[part(tensor, mtp), tensor.layer] += tensor.nbytes
        layer_sizes[tensor.layer] += tensor.nbytes
    unit, scale = unit_of(max(layer_sizes.values(), default=0))
    layers = sorted({layer for _, layer in sizes if layer is not None})
    places: list[int | None] = [*layers, None]
    names = [*map(str, layers), "outside"]
    bars = [
        go.Bar(
            name=name,
            x=names,
            y=[sizes[name, place] / scale for place in places],
            marker_color=colour,
            hovertemplate=f"layer %{{x}}: %{{y:.2f}} {unit}",
        )
        for name, colour in COLOURS.items()
    ]
    figure = go.Figure(bars)
    return _styled(
        figure,
        title=f"Bytes by layer: {_name(model)}",
        xaxis={"title": "layer", "type": "category", "nticks": 20},
        yaxis={"title": f"size in the file, {unit}"},
    )


def types_figure(model: GgufModel) -> "go.Figure":
    """Stacked bars: which types a role has over all layers, the largest roles first."""
    import plotly.graph_objects as go

    sizes: Counter[tuple[str, str]] = Counter()
    roles: Counter[str] = Counter()
    types: Counter[str] = Counter()
    for tensor in model.tensors.values():
        role = tensor.role.removesuffix(".weight")
        sizes[role, tensor.type] += tensor.nbytes
        roles[role] += tensor.nbytes
        types[tensor.type] += tensor.nbytes
    shown = [role for role, _ in roles.most_common(MOST_ROLES)]
    rest = [role for role in roles if role not in shown]
    unit, scale = unit_of(max(roles.values(), default=0))
    names = shown + ([f"{len(rest)} others"] if rest else [])
    bars = []
    for number, (kind, _) in enumerate(types.most_common()):
        values = [sizes[role, kind] for role in shown]
        values += [sum(sizes[role, kind] for role in rest)] if rest else []
        bars.append(
            go.Bar(
                name=kind,
                y=names,
                x=[value / scale for value in values],
                orientation="h",
                marker={
                    "color": PALETTE[number % len(PALETTE)],
                    "pattern": {"shape": PATTERNS[number // len(PALETTE) % len(PATTERNS)]},
                },
                hovertemplate=f"%{{y}}: %{{x:.2f}} {unit} {kind}",
            )
        )
    return _styled(
        go.Figure(bars),
        title=f"Types by role: {_name(model)}",
        xaxis={"title": f"size in the file, {unit}"},
        # Categories count upwards: the largest role belongs at the top.
        yaxis={"title": "role", "type": "category", "autorange": "reversed"},
        legend={"traceorder": "normal", "title": "type"},
        height=max(420, 24 * len(names) + 160),
    )


def memory_figure(plan: "Plan") -> "go.Figure":
    """Stacked bars: the fullest rank of each split against what the card offers, best first."""
    import plotly.graph_objects as go

    names: list[str] = []
    rows: dict[str, list[float]] = {name: [] for name in MEMORY}
    for split in plan.splits[:MOST_SPLITS]:
        names.append(f"tp {split.tp}, pp {split.pp}" + (f", dcp {split.dcp}" * (split.dcp > 1)))
        for name, value in zip(MEMORY, memory_parts(split, plan.card), strict=True):
            rows[name].append(value)
    figure = go.Figure(
        [
            go.Bar(
                name=name,
                x=names,
                y=values,
                marker_color=MEMORY[name],
                hovertemplate=f"%{{x}}: %{{y:.1f}} GiB {name}",
            )
            for name, values in rows.items()
        ]
    )
    card = plan.card
    lines = (
        (card.memory_gib, "solid", f"card: {card.memory_gib:g} GiB"),
        (
            card.budget / GIB,
            "dash",
            f"vLLM's {card.utilization * 100:.4g}%: {card.budget / GIB:.1f} GiB",
        ),
    )
    for height, dash, text in lines:
        figure.add_hline(
            height,
            line={"dash": dash, "color": "#000000", "width": 1},
            annotation={"text": text, "yanchor": "bottom", "bgcolor": "rgba(255,255,255,0.8)"},
            annotation_position="top left",
        )
    tallest = max(sum(column) for column in zip(*rows.values(), strict=True))
    return _styled(
        figure,
        title=f"Memory of the fullest GPU by split: {plan.model} on {plan.gpus} GPUs",
        xaxis={"title": "split, best first", "type": "category"},
        yaxis={
            "title": "GiB on one GPU",
            "range": [0, 1.12 * max(tallest, card.memory_gib)],
        },
    )


def _name(model: GgufModel) -> str:
    return str(model.metadata.get("general.name", model.path.name))


def _styled(figure: "go.Figure", **layout: Any) -> "go.Figure":
    """The look that all figures share."""
    common = {"barmode": "stack", "template": "plotly_white", "height": 420}
    figure.update_layout(**{**common, **layout})
    return figure
