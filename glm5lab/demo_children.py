"""The parts of the demo that run in processes of their own: `python -m glm5lab.demo_children`.

`kernel OUT.json` compares the Triton kernel with the reference: TRITON_INTERPRET is read when
Triton is imported. `check OUT.json FILE REFEREES LENGTHS [BACKEND]` is layer 4's proof: here the
engine's output is kept apart. OUT.json gets the figures, or `error` and `exit_code`.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from glm5lab.errors import CheckError, Glm5labError

# GLM-5's attention: 64 heads, rows of 512 + 64; a top-k that no block divides, some places empty.
TOKENS, HEADS, LATENT, ROPE, TOP_K, ROWS, PAGE = 4, 64, 512, 64, 50, 192, 64
SCALE = 256**-0.5
# Largest difference from a float64 reference, on float32 values of order 1.
TOLERANCE = 1e-5


def compare_kernel() -> dict[str, Any]:
    """Triton's sparse MLA in float32 against the reference in float64.

    Raises:
        CheckError: they differ by more than TOLERANCE.
    """
    import torch

    from glm5lab.attention import triton_interpreted
    from glm5lab.attention.reference import sparse_mla as reference
    from glm5lab.attention.sparse_mla import sparse_mla as kernel

    device = "cuda" if torch.cuda.is_available() and not triton_interpreted() else "cpu"
    gen = torch.Generator().manual_seed(0)
    q = torch.randn(TOKENS, HEADS, LATENT + ROPE, generator=gen).to(device)
    kv = torch.randn(ROWS // PAGE, PAGE, LATENT + ROPE, generator=gen).to(device)
    slots = torch.randint(0, ROWS, (TOKENS, TOP_K), generator=gen, dtype=torch.int32)
    slots[torch.rand(TOKENS, TOP_K, generator=gen) < 0.1] = -1
    slots = slots.to(device)
    found = kernel(q, kv, slots, SCALE, d_v=LATENT)
    expected = reference(q.double(), kv.double(), slots, SCALE, d_v=LATENT)
    pairs = zip(found, expected, strict=True)
    largest = max(float((a.double() - b).abs().max()) for a, b in pairs)
    if not largest <= TOLERANCE:
        raise CheckError(
            f"the Triton kernel differs from the reference by {largest:.1e}, at most {TOLERANCE:g} "
            "is allowed; `pytest tests/test_sparse_mla.py` narrows it down"
        )
    where = "in its interpreter" if triton_interpreted() else torch.cuda.get_device_name()
    return {
        "where": where,
        "largest": largest,
        "tokens": TOKENS,
        "heads": HEADS,
        "top_k": TOP_K,
    }


def check(file: str, referees: str, lengths: str, backend: str | None = None) -> dict[str, Any]:
    """The check's verdict; its table goes to stdout. A backend is asked for by name, if given."""
    from glm5lab.check import run_check

    prompts = [int(length) for length in lengths.split(",")]
    options: dict[str, Any] = {"attention_backend": backend} if backend else {}
    report = run_check(file, against=referees.split(","), prompts=prompts, **options)
    print(report.format(), flush=True)
    return {"ok": report.ok, "summary": report.summary(), "backend": report.backend}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {"kernel": compare_kernel, "check": check}


def main(arguments: Sequence[str]) -> int:
    """Run one part and write its figures; the exit code."""
    part, out, *more = arguments
    code, found = 0, {}
    try:
        found = PARTS[part](*more)
    except Glm5labError as error:
        code, found = error.exit_code, {"error": str(error), "exit_code": error.exit_code}
    Path(out).write_text(json.dumps(found))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
