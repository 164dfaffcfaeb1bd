"""One sparse-MLA call as its kernels see it."""

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from glm5lab.attention.reference import request_slots
from glm5lab.attention.tiles import Tile

# Kernels exponentiate by exp2; the LSE they return is a natural logarithm.
LOG2E = 1.4426950408889634
LN2 = tl.constexpr(0.6931471805599453)
# Arguments of the attend kernels whose value compiles nothing new.
RUNTIME = ["heads", "top_k", "slots", "page_size", "part", "parts", "stride_it"]
ANYWHERE = ["lengths_ptr"]  # a part of a batch's lengths may begin at any address
# Elements from head to head from which offsets of 128 heads exceed int32.
FAR = 1 << 24


@dataclass(frozen=True)
class Problem:
    """Checked arguments of `sparse_mla`.

    Attributes:
        q: [T, H, D], last dimension contiguous; [T, H, d_v] where q_rope has the others.
        kv: [S, D] or [P, page_size, D] in q's dtype, or uint8 with rows of 656 bytes.
        indices: [T, K] integer slots, rows contiguous.
        lengths: [T] integers, contiguous, or None.
        scale: factor on the scores.
        d_v: width of the values.
        q_rope: [T, H, D - d_v], last dimension contiguous, or None.
        table: [R, pages] and [T], contiguous: indices are places in requests; or None.
    """

    q: torch.Tensor
    kv: torch.Tensor
    indices: torch.Tensor
    lengths: torch.Tensor | None
    scale: float
    d_v: int
    q_rope: torch.Tensor | None = None
    table: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def whole(self) -> "Problem":
        """The same with queries in one tensor."""
        if self.q_rope is None:
            return self
        return replace(self, q=torch.cat((self.q, self.q_rope), -1), q_rope=None)

    @property
    def in_slots(self) -> "Problem":
        """The same with slots as indices."""
        if self.table is None:
            return self
        slots = request_slots(self.indices, self.table, self.pages.shape[1])
        return replace(self, indices=slots, table=None)

    @property
    def rope_part(self) -> torch.Tensor:
        """[T, H, D - d_v], the queries' columns behind d_v."""
        return self.q[..., self.d_v :] if self.q_rope is None else self.q_rope

    @property
    def tokens(self) -> int:
        """T."""
        return self.q.shape[0]

    @property
    def heads(self) -> int:
        """H."""
        return self.q.shape[1]

    @property
    def top_k(self) -> int:
        """K."""
        return self.indices.shape[1]

    @property
    def rope(self) -> int:
        """Width of the rotary part, the columns behind the values."""
        return self.rope_part.shape[2]

    @property
    def block_v(self) -> int:
        """Padded columns of one half of the values: kernels hold them in two tiles."""
        return max(16, triton.next_power_of_2(self.d_v) // 2)

    @property
    def block_r(self) -> int:
        """Padded columns of the rotary part."""
        return max(16, triton.next_power_of_2(max(self.rope, 1)))

    @property
    def fp8(self) -> bool:
        """Whether the rows are fp8_ds_mla."""
        return self.kv.dtype == torch.uint8

    @property
    def pages(self) -> torch.Tensor:
        """The cache with its page dimension, one page where it has none."""
        return self.kv if self.kv.dim() == 3 else self.kv[None]

    @property
    def slots(self) -> int:
        """S, the cache's rows."""
        return self.pages.shape[0] * self.pages.shape[1]

    @property
    def paged(self) -> bool:
        """Whether slots need a division: contiguous pages are rows at one stride."""
        pages = self.pages
        return self.kv.dim() == 3 and pages.stride(0) != pages.shape[1] * pages.stride(1)

    @property
    def page_stride(self) -> int:
        """Elements from page to page; 0 where the kernels do not ask for it.

        Of rows without pages it is the cache's size, by whose digits Triton would compile anew.
        """
        return self.pages.stride(0) if self.paged else 0

    @property
    def copies_whole_chunks(self) -> bool:
        """Whether the kernels for Hopper hold: GLM-5's widths, rows aligned to 16 bytes.

        Beside fp8_ds_mla rows, whose rope columns are bfloat16, queries must be bfloat16 too.
        """
        rows, q = self.pages, self.q
        aligned = rows.data_ptr() % 16 == 0 and q.data_ptr() % 16 == 0
        aligned &= all(s * rows.itemsize % 16 == 0 for s in rows.stride()[:2])
        aligned &= all(s % 16 == 0 for s in q.stride()[:2])
        if self.fp8:
            aligned &= q.stride(1) < FAR
            return aligned and q.dtype == torch.bfloat16 and rows.stride(1) == rows.shape[2]
        return aligned and q.itemsize == 2 and self.d_v == 512 and self.rope in (0, 64)


@dataclass(frozen=True)
class Parts:
    """Where the parts of a split token list are written.

    Attributes:
        out: [T, parts, H, d_v] float32, or the result [T, H, d_v] where there is one part.
        lse: [T, parts, H] float32.
        strides: of out: token, part, head.
        count: programs that share a token's list.
        places: places of the list that one of them walks.
        early: whether they may start before their predecessor has ended, and the merge before they
            have.
    """

    out: torch.Tensor
    lse: torch.Tensor
    strides: tuple[int, int, int]
    count: int
    places: int
    early: bool

    @property
    def options(self) -> dict[str, bool]:
        """Launch options of the kernels that compute the parts."""
        return {"launch_pdl": True} if self.early else {}

    def grid(self, problem: Problem, tile: Tile) -> tuple[int, int, int]:
        """Programs of an attend kernel: tokens, blocks of heads, parts."""
        return problem.tokens, triton.cdiv(problem.heads, tile.heads), self.count

    def arguments(self, problem: Problem, *row_strides: int) -> tuple[torch.Tensor | float, ...]:
        """What every attend kernel takes behind its queries and rows, in the kernels' order.

        Args:
            problem: checked arguments.
            row_strides: of pages, and of rows where the kernel takes it, in the kernel's unit.
        """
        q, indices = problem.q, problem.indices
        return (
            indices,
            indices if problem.lengths is None else problem.lengths,
            self.out,
            self.lse,
            problem.scale * LOG2E,
            problem.heads,
            problem.top_k,
            problem.slots,
            problem.pages.shape[1],
            self.places,
            self.count,
            q.stride(0),
            q.stride(1),
            *row_strides,
            indices.stride(0),
            *self.strides,
        )

    def constants(self, problem: Problem) -> dict[str, bool]:
        """The constexpr arguments that every attend kernel has."""
        return {
            "PAGED": problem.paged,
            "HAS_LENGTHS": problem.lengths is not None,
            "EARLY": self.early,
        }


@dataclass(frozen=True)
class Lists:
    """The distinct slots of each group of neighbouring tokens.

    Attributes:
        slots: [groups, capacity] int32.
        members: [groups, capacity] uint8, bit i set where the group's token i names the slot.
        counts: [groups] int32, places in use.
        group: tokens a group.
    """

    slots: torch.Tensor
    members: torch.Tensor
    counts: torch.Tensor
    group: int

    def arguments(
        self, problem: Problem, out: torch.Tensor, lse: torch.Tensor
    ) -> tuple[torch.Tensor | float, ...]:
        """What both kernels over shared rows take, in their order.

        Args:
            problem: checked arguments.
            out: [T, H, d_v], written.
            lse: [T, H] float32, written.
        """
        q, pages = problem.q, problem.pages
        return (
            q,
            pages,
            self.slots,
            self.members,
            self.counts,
            out,
            lse,
            problem.scale * LOG2E,
            problem.tokens,
            problem.heads,
            pages.shape[1],
            self.slots.shape[1],
            q.stride(0),
            q.stride(1),
            problem.page_stride,
            pages.stride(1),
            out.stride(0),
            out.stride(1),
        )
