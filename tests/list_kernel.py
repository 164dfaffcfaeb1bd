"""One list of a row, as a program for a whole row makes it."""

import triton
import triton.language as tl

from glm5lab.attention.topk_list import _list_row


@triton.jit
def list_kernel(in_ptr, list_ptr, count_ptr, width, k, SURPLUS: tl.constexpr):
    """A list [2, 1024] of a row's values and columns from a sample of 256; and its length.

    To be launched with 8 warps, for its 256 lanes.
    """
    count = _list_row(in_ptr, 0, width, k, list_ptr, 1024, 256, SURPLUS, 2, 256)
    tl.store(count_ptr, count)
