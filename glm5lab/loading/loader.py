"""vLLM's model loader for GGUF files, with an audit at its end; vLLM loads this module.

Every rank reads the parts that it keeps and copies them to their places itself; vLLM's own weight
loaders, which take whole tensors, are not called.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from vllm.distributed import get_tp_group, get_world_group
from vllm.logger import init_logger
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.utils import is_pp_missing_parameter

from glm5lab.gguf.part_reader import PartReader
from glm5lab.gguf.placement import border_notes
from glm5lab.gguf.reader import GgufModel
from glm5lab.json_output import write_json
from glm5lab.loading.audit import Audit, not_taken, require_none
from glm5lab.loading.destinations import Copy, copies
from glm5lab.loading.mtp import is_mtp, mtp_mappings
from glm5lab.loading.names import NameMapping
from glm5lab.loading.opened import Opened, forget, opened
from glm5lab.loading.progress import Progress
from glm5lab.loading.ranks import Ranks, ranks_of
from glm5lab.loading.report import report, report_path
from glm5lab.loading.streaming import Streamer

logger: logging.Logger = init_logger("vllm.glm5lab")


class GgufModelLoader(BaseModelLoader):
    """Load format "glm5lab": a prepared folder's GGUF shards into vLLM's GLM-5 model."""

    def download_model(self, model_config: Any) -> None:
        """Nothing to download: the shards are local files."""

    def load_weights(self, model: nn.Module, model_config: Any) -> None:
        """Fill every parameter of the model, or of its part on this rank.

        Raises:
            InputError: the folder or its shards cannot be used, or are damaged.
            CheckError: the audit found parameters or tensors that were not handled; RankError
                where another rank met an error.
        """
        draft = is_mtp(dict(model.named_parameters()))
        # A draft model is on the last pipeline stage only.
        group = get_tp_group() if draft else get_world_group()
        ranks = ranks_of(group.ranks, "mtp" if draft else "model")
        try:
            _Load(model, opened(model_config.model), ranks, draft).run()
        except BaseException as error:
            ranks.fail(error)
            raise
        finally:
            forget()


@dataclass
class _Load:
    """One load of one model on this rank."""

    model: nn.Module
    opened: Opened
    ranks: Ranks
    draft: bool

    @property
    def gguf(self) -> GgufModel:
        """The opened file."""
        return self.opened.model

    def run(self) -> None:
        """Fill, compare with the other ranks, report."""
        mappings = self._mappings()
        loaded = [m for m in mappings if not m.dropped]
        plan = copies(self.model, self.gguf, loaded, self._elsewhere)
        parameters: dict[str, torch.Tensor] = dict(self.model.named_parameters())
        plan = under_first_names(plan, self.model, parameters)
        padded = zero_padding(self.model, parameters)
        if self.ranks.leads:
            for note in border_notes(_held(plan), "this one"):
                logger.warning("%s.", note)
        audit = Audit({name: tuple(p.shape) for name, p in parameters.items()}, padded)
        progress = Progress(sum(c.nbytes for c in plan), logger, self.ranks.leads, self._label)
        with PartReader() as reader:
            self._fill(reader, plan, parameters, audit, progress)
        self._agree(audit, loaded)
        self._report(audit, parameters, mappings, progress)
        logger.info(
            "Loaded %d tensors of %s into %d parameters, %s: each parameter was filled, each "
            "tensor was used; %s.",
            len(loaded),
            self.gguf.path.name,
            len(parameters),
            self._label,
            progress,
        )

    @property
    def _label(self) -> str:
        return f"rank {self.ranks.rank} of {len(self.ranks.members)}"

    def _mappings(self) -> list[NameMapping]:
        if self.draft:
            return mtp_mappings(self.gguf, self.opened.config)
        return self.opened.complete.mappings

    def _elsewhere(self, name: str) -> bool:
        return is_pp_missing_parameter(name, self.model)

    def _fill(
        self,
        reader: PartReader,
        plan: Sequence[Copy],
        parameters: dict[str, torch.Tensor],
        audit: Audit,
        progress: Progress,
    ) -> None:
        try:
            for copy in plan:
                if not copy.part.elements:  # a rank without any of the vocabulary's rows
                    audit.filled(copy)
            # Closed at once when this rank stops, so that its threads end before the files close.
            with closing(Streamer(reader, parameters).run(plan)) as pieces:
                for piece in pieces:
                    audit.filled(piece)
                    progress.add(piece.nbytes, piece.part.tensor.name)
                    self.ranks.look()
        finally:
            progress.close()

    def _agree(self, audit: Audit, loaded: Sequence[NameMapping]) -> None:
        """Every rank's problems are every rank's error."""
        told = self.ranks.exchange((audit.problems(), audit.boxes()))
        label = len(told) > 1
        problems = [
            f"rank {rank}: {problem}" if label else problem
            for rank, (found, _) in zip(self.ranks.members, told, strict=True)
            for problem in found
        ]
        tensors = [self.gguf.tensors[m.gguf] for m in loaded]
        require_none(problems + not_taken([boxes for _, boxes in told], tensors))

    def _report(
        self,
        audit: Audit,
        parameters: dict[str, torch.Tensor],
        mappings: Sequence[NameMapping],
        progress: Progress,
    ) -> None:
        path = report_path(self.ranks.rank, len(self.ranks.members), self.draft)
        if path is None:
            return
        sizes = {
            name: (str(p.dtype).removeprefix("torch."), p.numel() * p.element_size())
            for name, p in parameters.items()
        }
        totals = {
            "file": str(self.gguf.path),
            "file_bytes": self.gguf.nbytes,
            "rank": self.ranks.rank,
            "ranks": len(self.ranks.members),
            "bytes_read": progress.done,
            "seconds": round(progress.seconds, 3),
        }
        write_json(path, report(audit, sizes, [m for m in mappings if m.dropped], totals))


def _held(plan: Sequence[Copy]) -> Iterator[tuple[str, str, int, int]]:
    """For `border_notes`: what this rank keeps as blocks."""
    for copy in plan:
        if copy.packed:
            part = copy.part
            yield part.tensor.name, part.tensor.type, part.nbytes, part.border_bytes


def under_first_names(
    plan: Sequence[Copy], model: nn.Module, parameters: dict[str, torch.Tensor]
) -> list[Copy]:
    """The copies under the names of `named_parameters`, where one parameter may have several."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    return [replace(c, parameter=names[id(model.get_parameter(c.parameter))]) for c in plan]


def zero_padding(model: nn.Module, parameters: dict[str, torch.Tensor]) -> set[str]:
    """Set to zero what may be larger than the file's tensors; their names.

    Vocabularies are padded to a multiple of rows, experts to sizes that some kernels want.
    """
    found = set()
    for path, module in model.named_modules():
        if hasattr(module, "shard_indices") or hasattr(module, "expert_map_manager"):
            for leaf, parameter in module.named_parameters(prefix=path, recurse=False):
                if leaf in parameters and parameter.dim() > 1:
                    parameter.data.zero_()
                    found.add(leaf)
    return found
