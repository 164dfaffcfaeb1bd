"""How far apart two engines' answers are."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

FLIP = 0.1


@dataclass(frozen=True)
class Difference:
    """Two answers to one prompt.

    Attributes:
        length: prompt tokens.
        mean: mean distance of the prompt tokens' log-probabilities; None where none were asked for,
            and the next two are 0.
        largest: their largest distance.
        beyond: share of them above 0.1, where an expert or a key of the top-k changed.
        same: generated tokens before the first that differs.
        generated: generated tokens.
        step: largest distance of a generated token's log-probability, up to there.
        margin: where tokens part, how much less likely the first holds the second's token.
    """

    length: int
    mean: float | None
    largest: float
    beyond: float
    same: int
    generated: int
    step: float
    margin: float


def difference(length: int, a: dict[str, Any], b: dict[str, Any]) -> Difference:
    """Compare two answers to the same prompt; see `child.answer`."""
    gaps = [abs(x - y) for x, y in zip(a["prompt"], b["prompt"], strict=True)]
    steps, margin, same = [0.0], 0.0, 0
    for token, other, p, q in zip(
        a["tokens"], b["tokens"], a["logprobs"], b["logprobs"], strict=True
    ):
        if token != other:
            first = p[str(token)]
            margin = first - p.get(str(other), min(p.values()))
            break
        same += 1
        steps.append(abs(p[str(token)] - q[str(token)]))
    count = len(gaps) or 1
    return Difference(
        length=length,
        mean=sum(gaps) / count if gaps else None,
        largest=max(gaps, default=0.0),
        beyond=sum(gap > FLIP for gap in gaps) / count,
        same=same,
        generated=len(a["tokens"]),
        step=max(steps),
        margin=margin,
    )


def differences(
    lengths: Sequence[int], a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]
) -> list[Difference]:
    """`difference` for every prompt."""
    return [difference(n, x, y) for n, x, y in zip(lengths, a, b, strict=True)]


def pooled_mean(rows: Sequence[Difference]) -> float | None:
    """Mean distance over the tokens of all prompts; None where a prompt has none."""
    return spread([rows])


def spread(tables: Sequence[Sequence[Difference]]) -> float | None:
    """`pooled_mean` of several comparisons over the same prompts: for each the greatest mean."""
    total, tokens = 0.0, 0
    for rows in zip(*tables, strict=True):
        means = [row.mean for row in rows if row.mean is not None]
        if len(means) < len(rows):
            return None
        total += max(means) * rows[0].length
        tokens += rows[0].length
    return total / tokens


def line(name: str, row: Difference) -> str:
    """One comparison as a line."""
    parted = "" if row.same == row.generated else f", parted at a margin of {row.margin:.3f}"
    prompt = "prompt not asked for"
    if row.mean is not None:
        prompt = f"prompt mean {row.mean:.4f}, max {row.largest:.3f}, {row.beyond:.1%} above {FLIP}"
    return (
        f"{name:36} {row.length:6} tokens: {prompt}; "
        f"{row.same}/{row.generated} generated alike, max {row.step:.3f}{parted}"
    )


def as_dicts(rows: Sequence[Difference]) -> list[dict[str, Any]]:
    """Rows for JSON."""
    return [asdict(row) for row in rows]
