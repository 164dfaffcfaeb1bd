"""Sparse MLA as Triton kernels: one program a query token, block of heads and part of its rows.

Same signature as `reference.sparse_mla`. A program walks its part of the token's list of slots in
blocks, gathers the latent rows and keeps a running softmax (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018); where a token's list is split among programs, a second
kernel merges their results ("Flash-Decoding", 2023). Runs on GPUs, and on CPUs under
TRITON_INTERPRET=1.
"""

from collections.abc import Callable

import torch

from glm5lab.attention import triton_interpreted
from glm5lab.attention.arguments import check_kernels_run_on, on_device_of
from glm5lab.attention.problem import FAR, Parts, Problem
from glm5lab.attention.sparse_mla_arguments import Query, Table, check_sparse_mla_arguments
from glm5lab.attention.sparse_mla_fp8 import attend_fp8
from glm5lab.attention.sparse_mla_merge import merge
from glm5lab.attention.sparse_mla_rows import attend_rows
from glm5lab.attention.tiles import (
    INTERPRETER,
    Device,
    Tile,
    cut_list,
    device_of,
    sparse_mla_parts,
    sparse_mla_tile,
)

# What a program has shared memory and registers for.
MAX_D_V, MAX_ROPE = 512, 64


def sparse_mla(
    q: Query,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    lengths: torch.Tensor | None = None,
    d_v: int = 512,
    out: torch.Tensor | None = None,
    check: bool = False,
    table: Table | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of every query token over its own list of cached latent rows.

    Arguments, result and errors are those of `reference.sparse_mla`, with these differences: q and
    out are float32, bfloat16 or float16 and of one dtype with kv, unless kv is uint8 (fp8_ds_mla
    rows, q then bfloat16 or float16); at most 512 columns are values and 64 stand behind them;
    out's last dimension is contiguous; fp8_ds_mla rows lie next to each other, their pages aligned
    to 16 bytes; and the LSE is float32.

    Args:
        q: [T, H, D], or its parts [T, H, d_v] and [T, H, D - d_v]; the plain kernel over 16-bit
            rows reads them where they are, the others a copy in one tensor.
        kv: [S, D], or pages [P, page_size, D] with any strides between pages and rows, a row's
            elements contiguous; uint8 rows of 656 bytes stand for fp8_ds_mla.
        indices: [T, K] int32 or int64 slots, -1 for an empty place; a slot outside kv counts as
            one.
        scale: factor on the scores.
        lengths: [T] int32 or int64, or None.
        d_v: width of the values, at most 512; D is at most 64 more.
        out: [T, H, d_v] in q's dtype, written in place when given; its last dimension is
            contiguous, no two elements share memory.
        check: compare every slot with the cache's size first, which waits for the device.
        table: [R, pages] int32 and [T] int32; the plain kernel over 16-bit rows looks places up by
            itself, before the others their slots are computed. Page numbers beyond kv and places
            beyond a request's pages count as empty. Request numbers are not checked: each must be
            from 0 to R - 1.

    Returns:
        out [T, H, d_v] in q's dtype, and the natural logarithm of the sum of exponentials [T, H]
        float32. A token with no place gets 0 and -inf.

    Raises:
        ValueError: an argument does not fit; with `check`, a slot outside the cache too.
    """
    problem, out, lse = checked_problem(q, kv, indices, scale, lengths, d_v, out, check, table)
    if problem.tokens:
        device = INTERPRETER if triton_interpreted() else device_of(problem.q.device.index or 0)
        run(problem, out, lse, device)
    return out, lse


def checked_problem(
    q: Query,
    kv: torch.Tensor,
    indices: torch.Tensor,
    scale: float,
    lengths: torch.Tensor | None,
    d_v: int,
    out: torch.Tensor | None,
    check: bool,
    table: Table | None = None,
) -> tuple[Problem, torch.Tensor, torch.Tensor]:
    """The arguments of `sparse_mla` as its kernels need them, the output and the LSE.

    Raises:
        ValueError: an argument does not fit; the message names it.
    """
    check_sparse_mla_arguments(q, kv, indices, scale, lengths, d_v, out, check, table)
    d_v = int(d_v)  # Triton knows no numpy integers
    q, q_rope = q if isinstance(q, tuple) else (q, None)
    _check_dtypes(q, kv, out)
    rope = q.shape[2] - d_v if q_rope is None else q_rope.shape[2]
    if d_v > MAX_D_V or rope > MAX_ROPE:
        raise ValueError(
            f"d_v: expected at most {MAX_D_V} columns of values and {MAX_ROPE} behind them, "
            f"got {d_v} of a width of {d_v + rope}"
        )
    check_kernels_run_on("q", q)
    out = q.new_empty(*q.shape[:2], d_v) if out is None else out
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    problem = Problem(
        q if q.stride(-1) == 1 else q.contiguous(),
        kv,
        indices if indices.stride(-1) == 1 else indices.contiguous(),
        None if lengths is None else lengths.contiguous(),
        scale,
        d_v,
        q_rope if q_rope is None or q_rope.stride(-1) == 1 else q_rope.contiguous(),
        None if table is None else (table[0].contiguous(), table[1].contiguous()),
    )
    return problem, out, lse


def run(problem: Problem, out: torch.Tensor, lse: torch.Tensor, device: Device) -> None:
    """Run the kernels with the tile and the parts that a device gets.

    Args:
        problem: checked arguments, of one token or more.
        out: [T, H, d_v], written.
        lse: [T, H] float32, written.
        device: decides about tile and parts.
    """
    tile = sparse_mla_tile(
        device,
        problem.tokens,
        problem.heads,
        problem.q.dtype.itemsize,
        problem.fp8,
        problem.copies_whole_chunks and (not problem.fp8 or out.stride(1) < FAR),
    )
    parts = sparse_mla_parts(device, tile, problem.tokens, problem.heads, problem.top_k)
    with on_device_of(problem.q):
        launch(problem, out, lse, device, tile, parts)


def launch(
    problem: Problem,
    out: torch.Tensor,
    lse: torch.Tensor,
    device: Device,
    tile: Tile,
    parts: int,
) -> None:
    """Run the kernels with a given tile and number of parts.

    Args:
        problem: checked arguments.
        out: [T, H, d_v], written.
        lse: [T, H] float32, written.
        device: decides whether the merge may be launched early.
        tile: blocks, warps, stages.
        parts: programs that share a token's list; 1 writes the result at once.
    """
    attend = _form(problem, tile)
    problem = problem if attend is attend_rows else problem.whole.in_slots
    parts, places = cut_list(problem.top_k, tile.rows, parts)
    if parts == 1:
        strides = (out.stride(0), 0, out.stride(1))
        attend(problem, Parts(out, lse, strides, 1, places, False), tile)
        return
    shape = (problem.tokens, parts, problem.heads)
    part_out = out.new_empty(*shape, problem.d_v, dtype=torch.float32)
    part_lse = lse.new_empty(shape)
    strides = (part_out.stride(0), part_out.stride(1), part_out.stride(2))
    split = Parts(part_out, part_lse, strides, parts, places, device.dependent_launch)
    attend(problem, split, tile)
    merge(problem, split, out, lse)


def _form(problem: Problem, tile: Tile) -> Callable[[Problem, Parts, Tile], None]:
    """What launches the kernel of a tile."""
    if not tile.hopper:
        return attend_fp8 if problem.fp8 else attend_rows
    # Gluon is imported where its kernels run.
    if problem.fp8:
        from glm5lab.attention.sparse_mla_hopper_fp8 import attend_hopper_fp8

        return attend_hopper_fp8
    from glm5lab.attention.sparse_mla_hopper import attend_hopper

    return attend_hopper


def _check_dtypes(q: torch.Tensor, kv: torch.Tensor, out: torch.Tensor | None) -> None:
    """Raise ValueError for what the reference takes and the kernels do not."""
    if q.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise ValueError(f"q: expected float32, bfloat16 or float16, got {q.dtype}")
    if kv.dtype == torch.uint8:
        if q.dtype == torch.float32 and not triton_interpreted():
            raise ValueError("q: expected bfloat16 or float16 beside fp8_ds_mla rows, got float32")
    elif kv.dtype != q.dtype:
        raise ValueError(f"kv: expected {q.dtype} (the dtype of q) or uint8, got {kv.dtype}")
    if out is not None and out.stride(-1) != 1:
        raise ValueError(
            f"out: expected a contiguous last dimension, got strides {tuple(out.stride())}"
        )
