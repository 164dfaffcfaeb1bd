"""From 1 to 16 GPUs: on how many does a file fit, and what fills the fullest of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from glm5lab.errors import counted
from glm5lab.gguf.memory import GIB
from glm5lab.gguf.plan import Plan, make_plan
from glm5lab.gguf.reader import GgufModel
from glm5lab.views.charts import MEMORY, memory_parts

if TYPE_CHECKING:
    import plotly.graph_objects as go

MOST_GPUS = 16


@dataclass(frozen=True)
class FitRow:
    """The best split over a number of GPUs, in GiB of the fullest one.

    Attributes:
        gpus: how many.
        split: such as "tp 8".
        parts: a value for each key of `charts.MEMORY`.
        tokens: tokens of cache, bf16 rows.
        verdict: in words.
        command: vLLM's command line where it fits, else "".
    """

    gpus: int
    split: str
    parts: tuple[float, ...]
    tokens: int
    verdict: str
    command: str


def gpu_numbers() -> range:
    """The numbers of GPUs that are tried."""
    return range(1, MOST_GPUS + 1)


def fit_row(model: GgufModel, gpus: int, gpu_memory: float) -> FitRow:
    """Plan a file for some GPUs of `gpu_memory` GiB each."""
    return _row(_plan(model, gpus, gpu_memory))


@lru_cache(maxsize=512)
def _plan(model: GgufModel, gpus: int, gpu_memory: float) -> Plan:
    return make_plan(model, gpus=gpus, gpu_memory_gib=gpu_memory)


def _row(plan: Plan) -> FitRow:
    best, card = plan.best, plan.card
    parts = memory_parts(best, card)
    split = best.shape
    cache = best.caches[0]
    if plan.fits:
        verdict = f"fits, {split}: {cache.tokens:,} tokens of cache with bf16 rows"
        words = ["vllm serve FILE", *best.options(card)]
        return FitRow(plan.gpus, split, parts, cache.tokens, verdict, " ".join(words))
    why = plan.problems or best.problems
    missing = f"{plan.missing_gib:.1f} GiB are missing on each GPU of the fullest stage"
    verdict = f"does not fit, best split {split}: {'; '.join(why) or missing}"
    return FitRow(plan.gpus, split, parts, 0, verdict, "")


def fit_figure(model: GgufModel, gpu_memory: float, chosen: int | None = None) -> "go.Figure":
    """Stacked bars over the number of GPUs: what the fullest holds, what is left, what is lacking.

    Args:
        model: an open file; its header is enough.
        gpu_memory: GiB of each GPU.
        chosen: this number's bar is drawn strongly, the others faintly; None for all strongly.
    """
    import plotly.graph_objects as go

    rows = [fit_row(model, n, gpu_memory) for n in gpu_numbers()]
    x = [row.gpus for row in rows]
    opacity = [1 if chosen in (None, n) else 0.45 for n in x]
    notes = [(row.split, row.verdict) for row in rows]
    bars = [
        go.Bar(
            name=name,
            x=x,
            y=[row.parts[number] for row in rows],
            marker={"color": colour, "opacity": opacity},
            customdata=notes,
            hovertemplate=f"%{{x}} GPUs, %{{customdata[0]}}: %{{y:.1f}} GiB {name}",
        )
        for number, (name, colour) in enumerate(MEMORY.items())
    ]
    budget = _plan(model, 1, gpu_memory).card.budget / GIB
    tallest = max(gpu_memory, *(sum(row.parts) for row in rows))
    figure = go.Figure(bars)
    figure.add_hline(
        budget,
        line={"dash": "dash", "color": "#000000", "width": 1},
        annotation={"text": f"what vLLM may take of {gpu_memory:g} GiB: {budget:.1f}"},
        annotation_position="top right",
    )
    figure.update_layout(
        title=title(rows, gpu_memory),
        barmode="stack",
        template="plotly_white",
        height=430,
        xaxis={"title": "number of GPUs", "dtick": 1},
        yaxis={"title": "GiB on the fullest GPU", "range": [0, 1.06 * tallest]},
        legend={"orientation": "h", "y": -0.2, "traceorder": "normal"},
        margin={"t": 60, "b": 60, "l": 70, "r": 20},
    )
    return figure


def title(rows: Sequence[FitRow], gpu_memory: float) -> str:
    """On how many GPUs it fits, in one line."""
    first = next((row.gpus for row in rows if row.command), None)
    if first is None:
        return f"Does not fit on {MOST_GPUS} GPUs of {gpu_memory:g} GiB"
    return f"Fits on {counted(first, 'GPU')} of {gpu_memory:g} GiB, and what fills the fullest"
