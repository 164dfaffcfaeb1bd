"""The union of the slots of neighbouring tokens, group by group.

What bounds it is L2: one atomic operation for every slot that a token names, 93 % of L2's rate on
an H200 (data/measurements/shared_rows_tiles.json).
"""

import torch
import triton
import triton.language as tl

from glm5lab.attention.compile import Compilation
from glm5lab.attention.problem import Lists, Problem
from glm5lab.attention.tiles import Device

MAX_GROUP = 8  # bits of a byte
BLOCK_SLOTS = 1024
# Marks of one program: 256 KB, which bounds them all to 69 MB on a Hopper however large the cache.
SPAN_WORDS = 1 << 16


@triton.jit
def _length(lengths_ptr, token, tokens, top_k, HAS_LENGTHS: tl.constexpr):
    """Places of a token's list; none for the tokens that fill up the last group."""
    length = tl.where(token < tokens, top_k, 0)
    if HAS_LENGTHS:
        given = tl.load(lengths_ptr + token, mask=token < tokens, other=0)
        length = tl.minimum(length, given.to(tl.int32))
    return length


@triton.jit(
    do_not_specialize=[
        "tokens",
        "groups",
        "top_k",
        "slots",
        "span",
        "words",
        "stride_it",
        "capacity",
    ],
    do_not_specialize_on_alignment=["lengths_ptr"],
)
def _union_kernel(
    indices_ptr,
    lengths_ptr,
    marks_ptr,
    slots_ptr,
    members_ptr,
    counts_ptr,
    tokens,
    groups,
    top_k,
    slots,
    span,
    words,
    stride_it,
    capacity,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_LENGTHS: tl.constexpr,
):
    """List each group's distinct slots, and for each slot one bit a token that names it.

    A program owns GROUP bits a slot of `marks`, all zero before and after, and walks the cache in
    spans that they cover. Every token sets its bit at its slots; whoever finds a slot without any
    bit lists it. When all have, the listed slots' bits are read and taken back.
    """
    PER_WORD: tl.constexpr = 32 // GROUP
    BITS: tl.constexpr = (1 << GROUP) - 1
    p_mark = marks_ptr + tl.program_id(0).to(tl.int64) * words
    o_k = tl.arange(0, BLOCK)
    for i_g in range(tl.program_id(0), groups, tl.num_programs(0)):
        p_slot = slots_ptr + capacity.to(tl.int64) * i_g
        p_member = members_ptr + capacity.to(tl.int64) * i_g
        count = 0
        for low in range(0, slots, span):
            listed = count
            for i_t in range(GROUP):
                i_token = i_g * GROUP + i_t
                length = _length(lengths_ptr, i_token, tokens, top_k, HAS_LENGTHS)
                p_i = indices_ptr + stride_it.to(tl.int64) * i_token
                for start in range(0, length, BLOCK):
                    b_slot = tl.load(p_i + start + o_k, mask=start + o_k < length, other=-1)
                    b_place = (b_slot - low).to(tl.int32)
                    m_slot = (b_slot >= low) & (b_slot < slots) & (b_place < span)
                    b_shift = (b_place % PER_WORD) * GROUP
                    p_word = p_mark + b_place // PER_WORD
                    b_bit = (1 << i_t) << b_shift
                    b_word = tl.atomic_or(p_word, b_bit, mask=m_slot, sem="relaxed")
                    m_new = m_slot & (((b_word >> b_shift) & BITS) == 0)
                    b_new = m_new.to(tl.int32)
                    o_new = count + tl.cumsum(b_new, 0) - 1
                    tl.store(p_slot + o_new, b_slot, mask=m_new)
                    count += tl.sum(b_new, 0)
            tl.debug_barrier()
            for start in range(listed, count, BLOCK):
                m_k = start + o_k < count
                b_place = tl.load(p_slot + start + o_k, mask=m_k, other=0) - low
                b_shift = (b_place % PER_WORD) * GROUP
                p_word = p_mark + b_place // PER_WORD
                b_word = tl.atomic_and(p_word, ~(BITS << b_shift), mask=m_k, sem="relaxed")
                b_bits = (b_word >> b_shift) & BITS
                tl.store(p_member + start + o_k, b_bits.to(tl.uint8), mask=m_k)
            tl.debug_barrier()
        tl.store(counts_ptr + i_g, count)


def list_unions(problem: Problem, group: int, device: Device) -> Lists:
    """The unions of groups of tokens.

    Args:
        problem: checked arguments.
        group: tokens a group; below 1 counts as 1.
        device: two programs a multiprocessor run at a time.
    """
    group = max(1, group)
    groups = triton.cdiv(problem.tokens, group)
    capacity = group * problem.top_k
    new = problem.indices.new_empty
    lists = Lists(
        new(groups, capacity, dtype=torch.int32),
        new(groups, capacity, dtype=torch.uint8),
        new(groups, dtype=torch.int32),
        group,
    )
    cached = problem.pages.shape[0] * problem.pages.shape[1]
    span = min(max(cached, 1), SPAN_WORDS * (32 // group))
    words = triton.cdiv(span, 32 // group)
    programs = min(groups, 2 * device.multiprocessors)
    _union_kernel[(programs,)](
        problem.indices,
        problem.indices if problem.lengths is None else problem.lengths,
        torch.zeros(programs, words, dtype=torch.int32, device=problem.q.device),
        lists.slots,
        lists.members,
        lists.counts,
        problem.tokens,
        groups,
        problem.top_k,
        cached,
        span,
        words,
        problem.indices.stride(0),
        capacity,
        GROUP=group,
        BLOCK=BLOCK_SLOTS,
        HAS_LENGTHS=problem.lengths is not None,
        num_warps=8,
    )
    return lists


def group_sizes(pairs: int) -> list[int]:
    """Tokens a group for 8, 16, 32 and more heads, where a program takes so many (token, head)."""
    return sorted({max(1, min(MAX_GROUP, pairs // heads)) for heads in (8, 16, 32, 64)})


def compilations(device: Device) -> list[Compilation]:
    """The union for every size of a group that 8 or more heads lead to on a device."""
    types = {"slots_ptr": "*i32", "members_ptr": "*u8", "counts_ptr": "*i32"}
    types |= {"indices_ptr": "*i32", "lengths_ptr": "*i32", "marks_ptr": "*i32"}
    found = []
    for group in group_sizes(64 if device.capability == 90 else 32):
        constants = {"GROUP": group, "BLOCK": BLOCK_SLOTS, "HAS_LENGTHS": True}
        found.append(Compilation(f"union of {group}", "_union_kernel", types, constants, 8))
    return found
