"""Which part of which tensor fills which part of a vLLM parameter on this rank.

The model that vLLM has built decides: its modules say how many rows, columns or experts are here
and which rank this is (linear.py, vocab_parallel_embedding.py, routed_experts.py, 0.32 and 0.33).
Nothing here imports vLLM; modules are asked for the attributes that they have.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from glm5lab.errors import CheckError
from glm5lab.gguf.parts import Part, whole
from glm5lab.gguf.reader import GgufModel
from glm5lab.loading.names import NameMapping


@dataclass(frozen=True)
class Slot:
    """Where one part of a layer's weight lies among the layer's parameters.

    Attributes:
        parameter: name within the layer.
        row: its first row there.
        rows: how many rows this rank holds.
        packed: whether the parameter holds the file's bytes instead of numbers.
    """

    parameter: str
    row: int
    rows: int
    packed: bool = False


@dataclass(frozen=True)
class Copy:
    """A part of a tensor, and the box of a parameter that it fills.

    Attributes:
        parameter: vLLM's name. A matrix counts as a stack of one, a vector as one row.
        part: what is taken.
        matrix, row: where the box begins; it is as large as the part.
        packed: bytes are copied as they are.
        values: attn_v_b, where the part is attn_k_b: each head's rows of it, transposed, come
            first and those of this part second.
    """

    parameter: str
    part: Part
    matrix: int = 0
    row: int = 0
    packed: bool = False
    values: Part | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts that are read for it."""
        return (self.part,) if self.values is None else (self.part, self.values)

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return sum(part.nbytes for part in self.parts)

    @property
    def box(self) -> tuple[range, range, int]:
        """Matrices, rows and (from 0) columns of the parameter that are filled."""
        matrices, rows, columns = self.part.byte_shape if self.packed else self.part.shape
        if self.values is not None:  # k_b is [heads, latent, nope]
            matrices, rows, columns = 1, matrices * self._head_rows, rows
        return range(self.matrix, self.matrix + matrices), range(self.row, self.row + rows), columns

    @property
    def _head_rows(self) -> int:
        assert self.values is not None
        return self.part.shape[2] + self.values.shape[1]

    def pieces(self, limit: int) -> Iterator["Copy"]:
        """The copy in steps that take at most `limit` bytes of the file each, if rows allow it."""
        if not self.part.elements:
            return
        first = self.part
        for part in first.pieces(limit, whole_matrices=self.values is not None):
            if self.values is None:
                matrix = self.matrix + part.stack.start - first.stack.start
                row = self.row + part.rows.start - first.rows.start
                yield replace(self, part=part, matrix=matrix, row=row)
            else:
                row = self.row + (part.stack.start - first.stack.start) * self._head_rows
                values = replace(self.values, stack=part.stack)
                yield replace(self, part=part, row=row, values=values)


def copies(
    model: Any,
    gguf: GgufModel,
    mappings: Sequence[NameMapping],
    elsewhere: Callable[[str], bool] = lambda name: False,
) -> list[Copy]:
    """Everything that this rank takes, in the order in which it lies in the files.

    Args:
        model: vLLM's model (a torch module).
        gguf: the opened file.
        mappings: the tensors to load.
        elsewhere: whether another pipeline stage holds a parameter of that name.

    Raises:
        CheckError: a tensor and its parameter do not fit; names both, and their shapes.
    """
    found: list[Copy] = []
    for mapping in mappings:
        if not elsewhere(mapping.vllm):
            tensor = gguf.tensors[mapping.gguf]
            found += _Place(model, mapping, whole(tensor)).copies()
    found = _join_kv_b(found)
    return sorted(
        found, key=lambda c: (c.part.tensor.shard, c.part.tensor.offset, c.part.rows.start)
    )


class _Place:
    """One tensor and the module that takes it."""

    def __init__(self, model: Any, mapping: NameMapping, source: Part) -> None:
        self.mapping, self.source = mapping, source
        self.path, _, self.leaf = mapping.vllm.rpartition(".")
        try:
            self.module = model.get_submodule(self.path)
            self.slots: dict[str, Slot] = getattr(self.module, "gguf_slots", {})
            if not self.slots:
                getattr(self.module, self.leaf)
        except AttributeError as error:
            raise CheckError(
                f"{mapping.gguf}: the model has no parameter {mapping.vllm} ({error})"
            ) from error

    def copies(self) -> list[Copy]:
        """The copies of the tensor; several for experts that do not lie together."""
        role = self.mapping.gguf.split(".")[-2]
        if hasattr(self.module, "expert_map_manager"):
            return [copy for part in self.mapping.part.split("+") for copy in self._experts(part)]
        if hasattr(self.module, "shard_indices"):
            return [self._vocabulary()]
        if role in ("attn_k_b", "attn_v_b"):
            return [self._heads()]
        if self.leaf == "weight" and hasattr(self.module, "output_partition_sizes"):
            return [self._linear()]
        return [self._copy(Slot(self.leaf, 0, self.source.shape[1]), self.source)]

    def _slot(self, part: str) -> Slot:
        """Where a part ("0", "1", "" for the only one) of a linear layer lies."""
        if part in self.slots:
            return self.slots[part]
        sizes, number = self.module.output_partition_sizes, int(part or 0)
        return Slot(self.leaf, sum(sizes[:number]), sizes[number])

    def _linear(self) -> Copy:
        slot = self._slot(self.mapping.part)
        columns = getattr(self.module, "input_size_per_partition", self.module.input_size)
        rank = self.module.tp_rank
        rows = self._share(self.source.rows, slot.rows, rank)
        part = replace(
            self.source, rows=rows, columns=self._share(self.source.columns, columns, rank)
        )
        return self._copy(slot, part)

    def _vocabulary(self) -> Copy:
        indices = self.module.shard_indices
        rows = self.source.rows[indices.org_vocab_start_index : indices.org_vocab_end_index]
        slot = replace(self._slot(""), rows=len(rows))
        return self._copy(slot, replace(self.source, rows=rows))

    def _heads(self) -> Copy:
        """k_b or v_b: its heads of this rank; `_join_kv_b` makes one copy of the two."""
        stack, module = self.source.stack, self.module
        whole_size = module.output_size // module.output_partition_sizes[0]
        heads = self._share(stack, len(stack) // whole_size, module.tp_rank)
        return Copy(self.mapping.vllm, replace(self.source, stack=heads))

    def _experts(self, part: str) -> Iterator[Copy]:
        """One part (w1, w3, w2) of the experts that are here."""
        config, source = self.module.moe_config, self.source
        halves = len(self.mapping.part.split("+"))
        inner = source.shape[1] // halves if part != "w2" else source.shape[2]
        share = self._share(range(inner), inner // config.tp_size, config.tp_rank)
        if part == "w2":
            source = replace(source, columns=share)
        else:
            skip = inner if halves == 2 and part == "w3" else 0
            source = replace(source, rows=range(share.start + skip, share.stop + skip))
        slot = self.slots.get(part)
        if slot is None:
            half = getattr(self.module, self.leaf).shape[1] // 2
            slot = Slot(self.leaf, half if part == "w3" else 0, len(source.rows))
        for there, here in self._local_experts():
            copy = self._copy(slot, replace(source, stack=there))
            yield replace(copy, matrix=here)

    def _local_experts(self) -> Iterator[tuple[range, int]]:
        """Runs of experts in the file that lie together here: (those, where the first goes).

        Behind the file's experts vLLM may ask for copies of the first ones (redundant experts).
        """
        count = len(self.source.stack)
        numbers = self.module.expert_map_manager.expert_map
        places = range(self.module.global_num_experts) if numbers is None else numbers.tolist()
        first = here = length = 0
        for physical, place in enumerate(places):
            if place < 0:
                continue
            expert = physical if physical < count else (physical - count) % count
            if length and expert == first + length and place == here + length:
                length += 1
                continue
            if length:
                yield range(first, first + length), here
            first, here, length = expert, place, 1
        if length:
            yield range(first, first + length), here

    def _copy(self, slot: Slot, part: Part) -> Copy:
        if len(part.rows) != slot.rows:
            raise self._misfit(f"{slot.rows} rows of {slot.parameter}", f"{len(part.rows)} rows")
        name = f"{self.path}.{slot.parameter}" if self.path else slot.parameter
        return Copy(name, part, row=slot.row, packed=slot.packed)

    def _share(self, total: range, local: int, rank: int) -> range:
        """This rank's run of `local` numbers; all of them where nothing is divided."""
        if local == len(total):
            return total
        if local < 1 or len(total) % local or (rank + 1) * local > len(total):
            raise self._misfit(f"a share of {local} for rank {rank}", f"{len(total)}")
        return total[rank * local : (rank + 1) * local]

    def _misfit(self, expected: str, found: str) -> CheckError:
        return CheckError(
            f"{self.mapping.gguf} {list(self.source.tensor.shape)} into {self.mapping.vllm}: "
            f"expected {expected}, found {found}"
        )


def _join_kv_b(found: list[Copy]) -> list[Copy]:
    """One copy for attn_k_b and attn_v_b of a layer, which vLLM keeps as one matrix."""
    pairs: dict[str, dict[str, Copy]] = {}
    rest = []
    for copy in found:
        role = copy.part.tensor.role.split(".")[-2]
        if role in ("attn_k_b", "attn_v_b"):
            pairs.setdefault(copy.parameter, {})[role] = copy
        else:
            rest.append(copy)
    for name, pair in pairs.items():
        if len(pair) != 2:
            raise CheckError(f"{name}: attn_k_b or attn_v_b is missing")
        rest.append(replace(pair["attn_k_b"], values=pair["attn_v_b"].part))
    return rest
