"""What a load did, as JSON: for each parameter its sources, types and bytes."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glm5lab.json_output import require_writable
from glm5lab.loading.audit import Audit
from glm5lab.loading.names import NameMapping

VARIABLE = "GLM5LAB_LOAD_REPORT"


def report_path(rank: int, ranks: int, draft: bool = False) -> Path | None:
    """Where a rank's report goes: GLM5LAB_LOAD_REPORT, its name with the rank where there are more.

    "load.json" becomes "load.rank3.json", a speculative decoder's "load.mtp.rank3.json".
    """
    name = os.environ.get(VARIABLE, "")
    if not name:
        return None
    path = Path(name)
    marks = (".mtp" if draft else "") + (f".rank{rank}" if ranks > 1 else "")
    return path.with_name(f"{path.stem}{marks}{path.suffix or '.json'}")


def ask_for_report(path: Path | None) -> None:
    """Have the loads of this process and its children reported; None changes nothing.

    Raises:
        InputError: the file cannot be written.
    """
    if path is None:
        return
    path = path.expanduser().absolute()
    require_writable(path)  # ranks write theirs under names of their own
    os.environ[VARIABLE] = str(path)


def report(
    audit: Audit,
    sizes: Mapping[str, tuple[str, int]],
    dropped: Sequence[NameMapping],
    totals: Mapping[str, Any],
) -> dict[str, Any]:
    """The report of one rank.

    A source's bytes are those of the file that were read for it; its border_bytes are those of
    them that are other ranks' share, where a border between ranks lies inside a block.

    Args:
        audit: of the load.
        sizes: dtype and bytes of every parameter.
        dropped: tensors that were left out, with their reasons.
        totals: file, rank, ranks, seconds, bytes_read and the like.
    """
    parameters: list[dict[str, Any]] = []
    for name, shape in audit.shapes.items():
        sources: dict[str, dict[str, Any]] = {}
        for part in audit.sources.get(name, ()):
            tensor = part.tensor
            entry = sources.setdefault(
                tensor.name,
                {"tensor": tensor.name, "type": tensor.type, "bytes": 0, "border_bytes": 0},
            )
            entry["bytes"] += part.nbytes
            entry["border_bytes"] += part.border_bytes
        dtype, nbytes = sizes[name]
        parameters.append(
            {
                "parameter": name,
                "shape": list(shape),
                "dtype": dtype,
                "bytes": nbytes,
                "sources": list(sources.values()),
            }
        )
    left_out = [{"tensor": m.gguf, "reason": m.dropped} for m in dropped]
    whole = {"parameter_bytes": sum(p["bytes"] for p in parameters)}
    return {**totals, **whole, "parameters": parameters, "dropped": left_out}
