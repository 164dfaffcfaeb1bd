"""The reference beside the Triton kernel, step by step, from their sources as they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

ATTENTION = Path(__file__).resolve().parents[1] / "attention"
REFERENCE, KERNEL = ATTENTION / "reference.py", ATTENTION / "sparse_mla_rows.py"
Span = tuple[str, str]  # how the first and the last line begin


@dataclass(frozen=True)
class Step:
    """One step of the computation, and the lines that make it on either side."""

    title: str
    reference: tuple[Span, ...]
    kernel: tuple[Span, ...]


STEPS = (
    Step(
        "Which places of the list count",
        (("filled = ", "filled &= place"),),
        (("length = top_k", "length = tl.minimum"), ("m_k = ", "m_k = ")),
    ),
    Step(
        "Gather the rows; an empty place reads nothing",
        (
            ("rows = gather_rows(kv, indices[part]", "rows = gather_rows(kv, indices[part]"),
            ("rows = rows.masked_fill", "rows = rows.masked_fill"),
        ),
        (("b_row = tl.where", "b_v1 = tl.load"),),
    ),
    Step(
        "Scores",
        (('scores = torch.einsum("thd,tkd->thk"', "scores.masked_fill_"),),
        (
            ("b_s = tl.dot(b_q0", "b_s = tl.dot(b_q1"),
            ("b_s = tl.dot(b_qr", "b_s = tl.dot(b_qr"),
            ("b_s = tl.where(m_k[None, :]", "b_s = tl.where(m_k[None, :]"),
        ),
    ),
    Step(
        "Softmax: at once, and block by block with what is known so far",
        (("lse[part] = torch.logsumexp", "weights = torch.exp"),),
        (("b_new = tl.maximum", "b_sum = b_sum * b_old"), ("b_lse = tl.where", "b_lse = tl.where")),
    ),
    Step(
        "Values, which are the rows' first 512 columns",
        (('result[part] = torch.einsum("thk,tkv->thv"', "result[part] = torch.einsum"),),
        (("b_w = b_p.to", "b_acc1 = tl.dot"), ("tl.store(p_out, ", "tl.store(p_out, ")),
    ),
)


def lines_of(path: Path, spans: Sequence[Span]) -> list[str]:
    """The lines from each span's first to its last, dedented; the first that match after `def`.

    Raises:
        ValueError: a span's lines are no longer in the source; the message names them.
    """
    start = "def sparse_mla(" if path == REFERENCE else "def _attend_kernel("
    source = path.read_text().partition(start)[2].splitlines()
    found: list[str] = []
    for first, last in spans:
        try:
            begin = next(i for i, line in enumerate(source) if line.strip().startswith(first))
            end = next(i for i in range(begin, len(source)) if source[i].strip().startswith(last))
        except StopIteration:
            what = f"{first!r} to {last!r}"
            raise ValueError(f"{path.name}: no lines {what}; adapt STEPS to the source") from None
        part = source[begin : end + 1]
        indent = min(len(line) - len(line.lstrip()) for line in part if line.strip())
        found += [line[indent:] for line in part]
    return found


class SideBySide:
    """All steps: HTML in a notebook, text elsewhere."""

    def __init__(self) -> None:
        self.steps = [
            (s.title, lines_of(REFERENCE, s.reference), lines_of(KERNEL, s.kernel)) for s in STEPS
        ]

    def __repr__(self) -> str:
        blocks = []
        for number, (title, reference, kernel) in enumerate(self.steps, 1):
            lines = [f"{number}. {title}", "reference.py"]
            lines += [f"    {line}" for line in reference]
            blocks.append("\n".join([*lines, KERNEL.name, *(f"    {line}" for line in kernel)]))
        return "\n\n".join(blocks)

    def _repr_html_(self) -> str:
        rows = [
            "<tr><th style='text-align:left'>reference.py, plain PyTorch</th>"
            f"<th style='text-align:left'>{KERNEL.name}, Triton</th></tr>"
        ]
        for number, (title, *sides) in enumerate(self.steps, 1):
            rows.append(
                f"<tr><td colspan='2' style='text-align:left;padding-top:10px'>"
                f"<b>{number}. {escape(title)}</b></td></tr>"
            )
            cells = "".join(f"<td style='{CELL}'>{_code(side)}</td>" for side in sides)
            rows.append(f"<tr>{cells}</tr>")
        return f"<table style='width:100%'>{''.join(rows)}</table>"


CELL = "vertical-align:top;text-align:left"


def _code(lines: Sequence[str]) -> str:
    """Lines with Python's colours, which need no style sheet."""
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    style = (
        "background:#f7f7f7;color:#1a1a1a;padding:6px;margin:0;font-size:11px;white-space:pre-wrap"
    )
    formatter = HtmlFormatter(noclasses=True, nobackground=True, prestyles=style)
    return str(highlight("\n".join(lines), PythonLexer(), formatter))
