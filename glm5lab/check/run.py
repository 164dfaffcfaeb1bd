"""`glm5lab check`: the engine's log-probabilities against independent referees."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from glm5lab.check.cases import Candidates, Case, normal_tokens, random_prompts
from glm5lab.check.compare import TOLERANCE, compare_case
from glm5lab.check.engine import ROOM, engine_rows
from glm5lab.check.hf import Choice, HfReferee, Judgement
from glm5lab.check.llamacpp import LlamaCppReferee
from glm5lab.check.progress import say
from glm5lab.check.report import CheckReport, ReportRow
from glm5lab.errors import CheckError, InputError

# Referee -> the package that it needs.
REFEREES = {"hf": "transformers", "llama.cpp": "xllamacpp"}


def run_check(
    file: str | Path,
    against: Sequence[str] = tuple(REFEREES),
    prompts: Sequence[int] = (8, 16, 40, 200),
    new_tokens: int = 8,
    dtype: str = "float32",
    seed: int = 0,
    **llm_options: Any,
) -> CheckReport:
    """Runs prompts in the engine and in the referees, and compares every row.

    Args:
        file: any shard of a GLM-5 GGUF file.
        against: "hf", "llama.cpp" or both.
        prompts: lengths in tokens; only those above top-k test the indexer.
        new_tokens: tokens that the engine generates; referees are fed the same ones.
        dtype: the engine's; one that compare.TOLERANCE has a row for.
        seed: of the prompts' random tokens.
        llm_options: further arguments of `vllm.LLM`.

    Returns:
        The report; `report.ok` is False when a row disagrees.

    Raises:
        InputError: the file cannot be used, or an argument is not known.
        CheckError: a referee or the engine is missing or broke down.
    """
    from glm5lab.gguf.config import read_architecture
    from glm5lab.gguf.reader import open_gguf
    from glm5lab.gguf.url import local_path

    model = open_gguf(local_path(file, "check"))
    unknown = [name for name in against if name not in REFEREES]
    if unknown or not against:
        known = " or ".join(REFEREES)
        raise InputError(file, f"no such referee: {', '.join(unknown) or 'none'}", f"use {known}")
    architecture = read_architecture(model)
    context = architecture.max_position_embeddings
    if not prompts or min(prompts) < 1 or max(prompts) + new_tokens > context - ROOM:
        raise InputError(
            file,
            f"cannot be given prompts of {', '.join(map(str, prompts)) or 'no'} tokens",
            f"use 1 to {context - ROOM - new_tokens} tokens",
        )
    if dtype not in TOLERANCE:
        known = " or ".join(TOLERANCE)
        raise InputError(file, f"an engine in {dtype} cannot be checked", f"use {known}")
    asked = random_prompts(normal_tokens(model.metadata, str(file)), prompts, seed)
    require_referees(against)
    ours, backend = engine_rows(model.files[0], asked, new_tokens, dtype, **llm_options)
    rows = judge(model.files[0], ours, against, dtype)
    tolerance = TOLERANCE[dtype]
    return CheckReport(
        file=str(file),
        dtype=dtype,
        backend=backend,
        tolerance=tolerance.logprob,
        tie=tolerance.tie,
        top_k=architecture.index_topk,
        rows=tuple(rows),
    )


def installed_referees() -> list[str]:
    """Names of the referees whose packages are there."""
    from importlib.util import find_spec

    return [name for name, package in REFEREES.items() if find_spec(package)]


def require_referees(against: Sequence[str]) -> None:
    """CheckError where a referee's package is missing, before anything slow starts."""
    for name in set(against) - set(installed_referees()):
        package = REFEREES[name]
        raise CheckError(f"the referee {name} needs {package}; pip install {package}")


def judge(
    path: Path, ours: Sequence[Candidates], against: Sequence[str], dtype: str
) -> list[ReportRow]:
    """Report rows of the engine's rows against each referee."""
    hf = LazyHf(path)
    rows = []
    if "hf" in against:
        for side in ours:
            say(f"hf: prompt of {len(side.case.prompt)} tokens")
            theirs = hf(side.case).logprobs
            rows.append(compare_case("hf", side, theirs, TOLERANCE[dtype], hf))
    if "llama.cpp" in against:
        say(f"llama.cpp: {len(ours)} prompts")
        answers = LlamaCppReferee(path).judge_all([side.case for side in ours])
        for side, answer in zip(ours, answers, strict=True):
            rows.append(compare_case("llama.cpp", side, answer, TOLERANCE[dtype], hf))
    return rows


class LazyHf:
    """The HF referee, built when first asked, answering each question once."""

    def __init__(self, path: Path) -> None:
        self._referee = cache(lambda: HfReferee(path))
        self._judge = cache(lambda case, swaps: self._referee().judge(case, swaps))

    def __call__(self, case: Case, swaps: Sequence[Choice] = ()) -> Judgement:
        """As `HfReferee.judge`."""
        judgement: Judgement = self._judge(case, tuple(swaps))
        return judgement
