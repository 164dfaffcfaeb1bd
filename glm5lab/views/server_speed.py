"""What `glm5lab bench server` prints and draws."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from glm5lab.errors import printable

if TYPE_CHECKING:
    import plotly.graph_objects as go

HEADER = (
    f"{'prompt':>7} {'at once':>7} {'done':>9}  {'first token ms':>18}  {'per token ms':>16}  "
    f"{'tokens/s out':>12} {'in all':>9}"
)
UNDER = f"{'tokens':>7} {'':>7} {'':>9}  {'median':>9}{'p99':>9}  {'median':>8}{'p99':>8}"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def bench_header() -> str:
    """The head of the live table."""
    return f"{HEADER}\n{UNDER}"


def bench_line(row: Mapping[str, Any]) -> str:
    """A point as a line of the live table."""
    ttft, tpot = row["ttft_ms"], row["tpot_ms"]
    done = f"{row['completed']}/{row['requests']}"
    line = (
        f"{row['prompt_tokens']:>7} {row['concurrency']:>7} {done:>9}  "
        f"{ttft['median']:>9.1f}{ttft['p99']:>9.1f}  {tpot['median']:>8.2f}{tpot['p99']:>8.2f}  "
        f"{row['output_tokens_per_s']:>12.1f} {row['total_tokens_per_s']:>9.1f}"
    )
    return f"{line}  {printable(row['error'])[:200]}" if row["failed"] else line


def comparison_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """Two results side by side; the ratio is after / before."""
    names = {"ttft_ms": "first token ms", "tpot_ms": "per token ms"}
    names["output_tokens_per_s"] = "tokens/s out"
    head = f"{'prompt':>7} {'output':>7} {'at once':>7}"
    lines = [head + "".join(f"  {title:>28}" for title in names.values())]
    lines.append(" " * len(head) + f"  {'before':>10}{'after':>10}{'ratio':>8}" * len(names))
    for row in rows:
        line = f"{row['prompt_tokens']:>7} {row['output_tokens']:>7} {row['concurrency']:>7}"
        for name in names:
            pair = row[name]
            ratio = "-" if pair["ratio"] is None else f"{pair['ratio']:.2f}"
            line += f"  {pair['before']:>10.2f}{pair['after']:>10.2f}{ratio:>8}"
        lines.append(line)
    return "\n".join(lines)


def speed_figure(*results: Mapping[str, Any], names: Sequence[str] = ()) -> "go.Figure":
    """Throughput over time per output token, a line a prompt length, a point a concurrency.

    Args:
        results: documents of `glm5lab bench server`.
        names: what to call each; by number where there are several, otherwise.
    """
    import plotly.graph_objects as go

    figure = go.Figure()
    dashes = ("solid", "dash", "dot", "dashdot")
    for number, result in enumerate(results):
        name = names[number] if names else "" if len(results) == 1 else f"{number + 1}"
        lengths = sorted({row["prompt_tokens"] for row in result["rows"]})
        for colour, length in enumerate(lengths):
            rows = [row for row in result["rows"] if row["prompt_tokens"] == length]
            rows.sort(key=lambda row: row["concurrency"])
            figure.add_scatter(
                name=f"{name} {length} tokens".strip(),
                x=[row["tpot_ms"]["median"] for row in rows],
                y=[row["output_tokens_per_s"] for row in rows],
                customdata=[(row["concurrency"], row["ttft_ms"]["median"]) for row in rows],
                text=[f"{row['concurrency']}" for row in rows],
                mode="lines+markers+text",
                textposition="top center",
                line={
                    "color": COLOURS[colour % len(COLOURS)],
                    "dash": dashes[number % len(dashes)],
                },
                hovertemplate="%{customdata[0]} at once: %{y:.1f} tokens/s, %{x:.2f} ms a token, "
                "first after %{customdata[1]:.1f} ms",
            )
    figure.update_layout(
        title="Throughput and time per output token, by prompt length and requests at once",
        xaxis={"title": "median time per output token, ms", "rangemode": "tozero"},
        yaxis={"title": "output tokens a second", "rangemode": "tozero"},
        template="plotly_white",
        height=460,
    )
    return figure
