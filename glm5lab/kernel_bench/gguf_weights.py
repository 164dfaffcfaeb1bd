"""Weights that stay GGUF blocks, at GLM-5's real sizes: products beside bf16, and loading them.

Products: the attention's output projection and a layer's 256 experts, 1 to 1024 tokens. The floor
is the bytes of the weights that are used over a copy kernel's rate; bf16 reads two to four times as
many. Loading: one stack of experts from the page cache into GPU memory, beside plain reading by
one thread and by as many as the loader has.
"""

import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional

from glm5lab.gguf.block_scales import HALF_SCALES
from glm5lab.gguf.kernels import MMQ
from glm5lab.gguf.part_reader import PartReader
from glm5lab.gguf.parts import whole
from glm5lab.gguf.tensors import Tensor, type_sizes
from glm5lab.kernel_bench.timing import Row, copy_rate, measure, relative
from glm5lab.loading.destinations import Copy
from glm5lab.loading.streaming import MOST_THREADS, PIECE_BYTES, Streamer
from glm5lab.vllm_plugin.gguf_kernels import Routing, dequantize, expert_matmul, matmul

KINDS = ("Q4_K", "Q6_K", "IQ4_XS", "Q8_0")
TOKENS = (1, 8, 16, 32, 64, 1024)
BOTH_TOKENS = 64  # up to so many tokens experts are measured unsorted and sorted
HIDDEN, WIDTH, EXPERTS, TOP_K, HEADS = 6144, 2048, 256, 8, 64 * 256
SETS = 3  # of weights: together more than the caches hold
CHECKED = 256  # rows of a result that are compared with float64
BOUND = 1e-2  # error: the kernels round activations to 8 bits


def type_number(kind: str) -> int:
    """GGML's number of a type."""
    return next(number for number, (name, _, _) in type_sizes().items() if name == kind)


def blocks(kind: str, *shape: int, device: str = "cuda") -> torch.Tensor:
    """Random blocks with scales of 0.01: uint8 [..., rows, bytes] for a shape in numbers."""
    _, elements, nbytes = type_sizes()[type_number(kind)]
    width = shape[-1] // elements * nbytes
    data = torch.randint(0, 256, (*shape[:-1], width), dtype=torch.uint8, device=device)
    scale = torch.tensor([0.01], dtype=torch.float16, device=device).view(torch.uint8)
    for at in HALF_SCALES[kind]:
        data.view(-1, nbytes)[:, at : at + 2] = scale
    return data


def bench_weights() -> tuple[float, Iterator[Row]]:
    """A copy kernel's bytes a microsecond, and every measurement of a product."""
    torch.manual_seed(0)
    rate = copy_rate()
    return rate, _rows(rate)


def _rows(rate: float) -> Iterator[Row]:
    for kind in KINDS:
        yield from linear(kind, rate)
        torch.cuda.empty_cache()
    for kind in KINDS:
        yield from experts(kind, rate)
        torch.cuda.empty_cache()


def linear(kind: str, rate: float) -> Iterator[Row]:
    """attn_output: [6144, 16384]."""
    number = type_number(kind)
    packed = [blocks(kind, HIDDEN, HEADS) for _ in range(SETS)]
    plain = [dequantize(weight, number, torch.bfloat16) for weight in packed]
    some = dequantize(packed[0][:CHECKED], number, torch.float32).double()
    for tokens in TOKENS:
        x = torch.randn(tokens, HEADS, device="cuda", dtype=torch.bfloat16)
        expected = x.double() @ some.T

        def error(got: torch.Tensor, expected: torch.Tensor = expected) -> float:
            return relative(got[:, :CHECKED], expected)

        def of_blocks(i: int, x: torch.Tensor = x) -> torch.Tensor:
            return matmul(x, packed[i], number)

        def of_numbers(i: int, x: torch.Tensor = x) -> torch.Tensor:
            return functional.linear(x, plain[i])

        moved = packed[0].nbytes + x.nbytes + tokens * HIDDEN * 2
        case = f"attn_output, {kind}, {tokens} tokens"
        both = {"GGUF blocks": of_blocks, "bf16": of_numbers}
        yield from measure(case, both, SETS, error, moved / rate, bound=BOUND)


def experts(kind: str, rate: float) -> Iterator[Row]:
    """Gate with up [256, 4096, 6144] and down [256, 6144, 2048], each alone."""
    yield from _stack(kind, rate, "gate and up", 2 * WIDTH, HIDDEN, True)
    yield from _stack(kind, rate, "down", HIDDEN, WIDTH, False)


def _stack(
    kind: str, rate: float, name: str, rows: int, columns: int, shared: bool
) -> Iterator[Row]:
    """One stack of experts; `shared` as for `gguf_kernels.expert_matmul`."""
    number, packed = type_number(kind), blocks(kind, EXPERTS, rows, columns)
    for tokens in TOKENS:
        choices = [_choices(tokens) for _ in range(SETS)]
        routes = [Routing(ids, EXPERTS, None) for ids in choices]
        height = tokens if shared else tokens * TOP_K
        x = torch.randn(height, columns, device="cuda", dtype=torch.bfloat16)
        expected = _first_pairs(x, packed, number, choices[0], shared)

        def product(
            i: int,
            x: torch.Tensor = x,
            routes: Sequence[Routing] = routes,
            few: int = BOTH_TOKENS,
        ) -> torch.Tensor:
            return expert_matmul(x, packed, number, routes[i], shared, few)

        forms: dict[str, Callable[[int], torch.Tensor]] = {"GGUF blocks": product}
        if kind in MMQ and 1 < tokens <= BOTH_TOKENS:
            forms["sorted by expert"] = partial(product, few=0)

        def error(got: torch.Tensor, expected: torch.Tensor = expected) -> float:
            return relative(got[: len(expected)], expected)

        used = sum(len(ids.unique()) for ids in choices) / SETS
        moved = packed[0].nbytes * used + x.nbytes + tokens * TOP_K * rows * 2
        case = f"experts' {name}, {kind}, {tokens} tokens"
        yield from measure(case, forms, SETS, error, moved / rate, bound=BOUND)


def _choices(tokens: int) -> torch.Tensor:
    """Eight different experts a token."""
    scores = torch.rand(tokens, EXPERTS, device="cuda")
    return scores.topk(TOP_K, dim=1).indices


def _first_pairs(
    x: torch.Tensor, packed: torch.Tensor, number: int, ids: torch.Tensor, shared: bool
) -> torch.Tensor:
    """float64 results of the first token's experts: [8, rows]."""
    found = []
    for place, expert in enumerate(ids[0].tolist()):
        matrix = dequantize(packed[expert], number, torch.float32).double()
        found.append(matrix @ x[0 if shared else place].double())
    return torch.stack(found)


def bench_loading(folder: Path | None = None) -> dict[str, float]:
    """Bytes a second of loading a stack of experts from the page cache, and of plain reading.

    Args:
        folder: where a file of 3.6 GB is written; None for the temporary folder.
    """
    kind = "Q4_K"
    one = blocks(kind, 2 * WIDTH, HIDDEN, device="cpu").numpy().tobytes()
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".gguf") as file:
        for _ in range(EXPERTS):
            file.write(one)
        file.flush()
        shape = (EXPERTS, 2 * WIDTH, HIDDEN)
        path, nbytes = Path(file.name), EXPERTS * len(one)
        tensor = Tensor("experts", shape, type_number(kind), kind, nbytes, 0, path, 0)
        width = len(one) // (2 * WIDTH)
        parameter = torch.empty(EXPERTS, 2 * WIDTH, width, dtype=torch.uint8, device="cuda")
        seconds: dict[str, list[float]] = {"read": [], "read_together": [], "load": []}
        for _ in range(4):  # the first round warms the page cache and the pinned buffers
            seconds["read"].append(plain_read(path, 1))
            seconds["read_together"].append(plain_read(path, MOST_THREADS))
            began = time.perf_counter()
            with PartReader() as reader:
                copy = Copy("experts", whole(tensor), packed=True)
                for _piece in Streamer(reader, {"experts": parameter}).run([copy]):
                    pass
            torch.cuda.synchronize()
            seconds["load"].append(time.perf_counter() - began)
        rates = {name: nbytes / sorted(took[1:])[1] for name, took in seconds.items()}
    return {
        "bytes": nbytes,
        **{f"{name}_bytes_s": rate for name, rate in rates.items()},
        "load_over_read": rates["load"] / rates["read"],
        "load_over_read_together": rates["load"] / rates["read_together"],
    }


def plain_read(path: Path, threads: int) -> float:
    """Seconds in which some threads read a file into buffers of 16 MiB."""
    buffers = [bytearray(PIECE_BYTES) for _ in range(threads)]
    descriptor = os.open(path, os.O_RDONLY)
    size = os.fstat(descriptor).st_size

    def read(number: int) -> None:
        for start in range(number * PIECE_BYTES, size, threads * PIECE_BYTES):
            os.preadv(descriptor, [buffers[number]], start)

    began = time.perf_counter()
    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(read, range(threads)))
    finally:
        os.close(descriptor)
    return time.perf_counter() - began
