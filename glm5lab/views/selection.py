"""Which attention backend vLLM takes for GLM-5 on any GPU, with its reasons against the others."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from glm5lab.selection_table import Table, selection
from glm5lab.views.live import html_table, is_live
from glm5lab.views.text import table_lines
from glm5lab.vllm_plugin import BACKEND

if TYPE_CHECKING:
    import pandas as pd

CAPABILITIES = {
    "8.0 (A100)": "8.0",
    "8.9 (4090)": "8.9",
    "9.0 (H100, H200)": "9.0",
    "10.0 (B200)": "10.0",
    "12.0 (RTX PRO 6000, 5090)": "12.0",
    "12.1 (GB10)": "12.1",
}
NONE = "none"
DENSE = "sparse not supported"  # vLLM's words about a backend that is no alternative at all
UNASKED = "ModuleNotFoundError"  # what it needs is not installed here, so vLLM cannot say it


def format_selection(table: Table) -> str:
    """One small table a capability; a star marks what vLLM serves only with glm5lab."""
    blocks = []
    for capability, by_flashinfer in table.items():
        columns = list(by_flashinfer)
        rows = [("cache dtype", *columns)] + [
            (dtype, *(_starred(by_flashinfer[name][dtype]) for name in columns))
            for dtype in by_flashinfer[columns[0]]
        ]
        title = f"sparse attention of GLM-5 in bfloat16, compute capability {capability}"
        blocks.append("\n".join([title, *table_lines(rows)]))
    if any("*" in block for block in blocks):
        blocks.append("* nothing serves it without glm5lab")
    return "\n\n".join(blocks)


def _starred(choice: dict[str, Any]) -> str:
    if choice["chosen"] is None:
        return NONE
    return choice["chosen"] + ("" if choice["native"] else " *")


def selection_rows(table: Table, capability: str) -> "pd.DataFrame":
    """One row a cache dtype and FlashInfer or not.

    Args:
        table: from `selection_table.selection`.
        capability: one of its keys.

    Returns:
        cache, flashinfer, stock (what vLLM takes without glm5lab), here (what it takes with it),
        against (why not the others, the plugin's own backend aside).
    """
    import pandas as pd

    rows = []
    for flashinfer, by_cache in table[capability].items():
        for cache, choice in by_cache.items():
            rows.append(
                {
                    "cache": cache,
                    "flashinfer": flashinfer.removesuffix(" flashinfer"),
                    "stock": choice["native"] or NONE,
                    "here": choice["chosen"] or NONE,
                    "against": reasons(choice["refused"]),
                }
            )
    return pd.DataFrame(rows)


def reasons(refused: Mapping[str, list[str]]) -> str:
    """Backend and its reasons, each once, separated by semicolons; dense backends are left out."""
    parts = []
    for backend, why in refused.items():
        if DENSE in why or ("SPARSE" not in backend and any(UNASKED in text for text in why)):
            continue
        once = ", ".join(dict.fromkeys(text.replace(f"{backend} ", "") for text in why))
        parts.append(f"{backend}: {once}")
    return "; ".join(parts)


def selection_lines(rows: "pd.DataFrame", width: int = 130) -> str:
    """The rows as text."""
    cells = [tuple(rows.columns), *(tuple(r) for r in rows.itertuples(index=False, name=None))]
    return "\n".join(table_lines(cells, width, whole=("cache", "flashinfer")))


def selection_explorer(table: Table, capability: str) -> None:
    """The table of one capability; in JupyterLab others can be chosen, which vLLM is asked for."""
    if not is_live():
        print(selection_lines(selection_rows(table, capability)))
        return
    from IPython.display import display

    display(_widget(table, capability))


def _widget(table: Table, capability: str) -> Any:
    import ipywidgets as w

    known = dict(table)
    choice = w.Dropdown(options=CAPABILITIES, value=capability, description="capability")
    result = w.HTML()

    def update(_: Any = None) -> None:
        wanted = choice.value
        if wanted not in known:
            result.value = f"asking vLLM about {wanted}, some 20 seconds ..."
            known.update(selection([wanted]))
        rows = selection_rows(known, wanted)
        served = int((rows["here"] == BACKEND).sum())
        alone = int(((rows["here"] == BACKEND) & (rows["stock"] == NONE)).sum())
        result.value = (
            f"{BACKEND} serves {served} of {len(rows)} cases, {alone} of them nothing else does"
            + html_table(list(rows.columns), list(rows.itertuples(index=False, name=None)))
        )

    choice.observe(update, names="value")
    update()
    return w.VBox([choice, result])
