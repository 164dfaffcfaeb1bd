"""Which tokens a query attends to: the lightning indexer of a file's first layer, for any text.

Only the first layer can be computed from embeddings alone, and it needs few weights: a real file
answers in seconds, from the rows that the text's tokens have in the embedding. The formulas are
those of Hugging Face's GlmMoeDsa model; the scores and the choice are `attention.reference`'s.
"""

import tempfile
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from glm5lab.gguf.config import hf_config
from glm5lab.gguf.reader import GgufModel
from glm5lab.gguf.tokenizer import write_tokenizer
from glm5lab.views.live import LIVE_WIDTH, show

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import torch

MOST_TOKENS = 200
K_NORM_EPS = 1e-6  # of vLLM and Hugging Face; no file says it
CHOSEN, SEEN, NEITHER = "#0072B2", "#cfe3f1", "rgba(0,0,0,0)"


@dataclass(frozen=True)
class Attended:
    """A text's tokens with the first layer's choice.

    Attributes:
        tokens: their texts.
        logits: [T, T] float64 scores, -inf for tokens that come later.
        chosen: [T, k] int32 positions, -1 where a token has fewer before it.
    """

    tokens: list[str]
    logits: "torch.Tensor"
    chosen: "torch.Tensor"

    def of(self, query: int) -> list[int]:
        """The positions that one token attends to, ascending."""
        return [int(p) for p in self.chosen[query] if p >= 0]


def attended(model: GgufModel, text: str, k: int | None = None) -> Attended:
    """Tokenize a text with the file's tokenizer and let its first layer choose.

    Args:
        model: a GLM-5 with its weights.
        text: cut off after MOST_TOKENS tokens.
        k: how many each token attends to; None for the model's own number.
    """
    import torch
    from transformers import AutoTokenizer

    from glm5lab.attention import reference

    config = hf_config(model)
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(model, Path(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(text).input_ids[:MOST_TOKENS]
    pieces = [tokenizer.decode([token]) for token in ids]
    q, keys, weights = index_inputs(model, config, ids)
    ends = torch.arange(1, len(ids) + 1)
    logits = reference.mqa_logits(q, keys, weights, end=ends)
    return Attended(pieces, logits, reference.top_k(logits, k or config["index_topk"]))


def index_inputs(
    model: GgufModel, config: dict[str, Any], ids: list[int]
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """The first layer's index queries [T, H, D], keys [T, D] and head weights [T, H], float64."""
    import torch

    def weight(name: str) -> torch.Tensor:
        return torch.from_numpy(model.dequantize(f"blk.0.{name}")).double()

    rows = [model.dequantize("token_embd.weight", slice(i, i + 1))[0] for i in ids]
    hidden = torch.stack([torch.from_numpy(row) for row in rows]).double()
    eps = config["rms_norm_eps"]
    hidden = _rms_norm(hidden, weight("attn_norm.weight"), eps)
    latent = _rms_norm(hidden @ weight("attn_q_a.weight").T, weight("attn_q_a_norm.weight"), eps)
    heads, width = config["index_n_heads"], config["index_head_dim"]
    q = (latent @ weight("indexer.attn_q_b.weight").T).view(len(ids), heads, width)
    keys = torch.nn.functional.layer_norm(
        hidden @ weight("indexer.attn_k.weight").T,
        (width,),
        weight("indexer.k_norm.weight"),
        weight("indexer.k_norm.bias"),
        K_NORM_EPS,
    )
    theta, rope = config["rope_parameters"]["rope_theta"], config["qk_rope_head_dim"]
    q, keys = _rotated(q, rope, theta), _rotated(keys[:, None], rope, theta)[:, 0]
    factor = heads**-0.5 * width**-0.5
    return q, keys, hidden @ weight("indexer.proj.weight").T * factor


def _rms_norm(x: "torch.Tensor", weight: "torch.Tensor", eps: float) -> "torch.Tensor":
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


def _rotated(x: "torch.Tensor", rope: int, theta: float) -> "torch.Tensor":
    """Rotate the first `rope` columns of [T, H, D] in neighbouring pairs, by position."""
    import torch

    turn = theta ** (-torch.arange(0, rope, 2, dtype=torch.float64) / rope)
    angle = (torch.arange(x.shape[0], dtype=torch.float64)[:, None] * turn)[:, None]
    even, odd = x[..., 0:rope:2], x[..., 1:rope:2]
    pair = [even * angle.cos() - odd * angle.sin(), odd * angle.cos() + even * angle.sin()]
    return torch.cat([torch.stack(pair, -1).flatten(-2), x[..., rope:]], -1)


def attended_figure(choice: Attended) -> "go.Figure":
    """A map of queries and positions: attended to, seen but left out, not yet there."""
    import plotly.graph_objects as go

    size = len(choice.tokens)
    state = [[1 if p <= t else 0 for p in range(size)] for t in range(size)]
    for query in range(size):
        for position in choice.of(query):
            state[query][position] = 2
    figure = go.Figure(
        go.Heatmap(
            z=state,
            zmin=0,
            zmax=2,
            colorscale=[(0, NEITHER), (0.5, SEEN), (1, CHOSEN)],
            showscale=False,
            xgap=1,
            ygap=1,
            hovertemplate="query %{y}, position %{x}<extra></extra>",
        )
    )
    for name, colour in (("attended to", CHOSEN), ("visible, left out", SEEN)):
        figure.add_scatter(
            x=[None], y=[None], mode="markers", name=name,
            marker={"color": colour, "symbol": "square", "size": 12},
        )  # fmt: skip
    figure.update_layout(
        title=f"Top-{choice.chosen.shape[1]} of the first layer: what each token attends to",
        xaxis={"title": "position in the text", "constrain": "domain"},
        yaxis={"title": "query token", "autorange": "reversed", "scaleanchor": "x"},
        template="plotly_white",
        height=460,
        legend={"x": 0.6, "y": 0.98},
        margin={"t": 60, "b": 60, "l": 70, "r": 20},
    )
    return figure


def attended_html(choice: Attended, query: int) -> str:
    """The text with what one token attends to marked, and the token itself framed."""
    marked = set(choice.of(query))
    parts = []
    for position, token in enumerate(choice.tokens):
        colour = CHOSEN if position in marked else SEEN if position <= query else NEITHER
        ink = "#ffffff" if position in marked else "#000000" if position <= query else "inherit"
        frame = "outline:2px solid #D55E00;" if position == query else ""
        style = f"background:{colour};color:{ink};{frame}padding:1px 3px;margin:1px;"
        parts.append(
            f"<span style='{style}border-radius:3px;display:inline-block'>"
            f"{escape(token).replace(' ', '&middot;') or '&nbsp;'}</span>"
        )
    body = "".join(parts)
    return f"<div style='line-height:1.7;font-family:monospace;max-width:880px'>{body}</div>"


def attended_explorer(model: GgufModel, text: str) -> None:
    """A text, a query and k to play with; without a person before it, the map of all queries."""
    choice = attended(model, text)
    show(attended_figure(choice), lambda: _widget(model, text, choice))


def _widget(model: GgufModel, text: str, choice: Attended) -> Any:
    import ipywidgets as w
    import plotly.graph_objects as go

    most = choice.chosen.shape[1]
    words = w.Textarea(text, description="text", rows=3, layout={"width": "90%"})
    size = len(choice.tokens)
    query = w.IntSlider(size - 1, 0, size - 1, description="query", layout={"width": "45%"})
    k = w.IntSlider(most, 1, max(most, 2), description="top-k", layout={"width": "45%"})
    result = w.HTML()
    figure = go.FigureWidget(attended_figure(choice)).update_layout(width=LIVE_WIDTH)
    now = [choice]

    def draw(_: Any = None) -> None:
        chosen = now[0].of(query.value)
        left = query.value + 1 - len(chosen)
        said = (
            f"token {query.value} attends to {len(chosen)} of the {query.value + 1} tokens it sees"
        )
        result.value = f"<b>{said}, {left} are left out</b>" + attended_html(now[0], query.value)

    def again(_: Any = None) -> None:
        now[0] = attended(model, words.value or " ", k.value)
        query.max = max(len(now[0].tokens) - 1, 0)
        new = attended_figure(now[0])
        with figure.batch_update():
            figure.data[0].z, figure.layout.title = new.data[0].z, new.layout.title
        draw()

    words.observe(again, names="value")
    k.observe(again, names="value")
    query.observe(draw, names="value")
    draw()
    return w.VBox([words, w.HBox([query, k]), result, figure])
