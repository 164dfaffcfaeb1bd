"""What `glm5lab fuzz` does: a long run with a progress bar, or one case to look at."""

import tempfile
from pathlib import Path
from typing import Any

from glm5lab.errors import InputError
from glm5lab.fuzz.case import write_case
from glm5lab.fuzz.draft import base_sets
from glm5lab.fuzz.report import fuzz_text
from glm5lab.fuzz.run import run_fuzz


def run_command(
    cases: int, seed: int, seconds: float | None, jobs: int | None
) -> tuple[str, dict[str, Any]]:
    """Run the cases; the report as text and as plain values. Progress shows on a terminal only."""
    from tqdm import tqdm

    with tqdm(total=cases, unit="case", disable=None, leave=False) as bar:
        report = run_fuzz(cases, seed, seconds, jobs, lambda _: bar.update(1))
    return fuzz_text(report), report.to_json()


def keep_case(seed: int, case: int) -> Path:
    """Write the files of one case to ./case-N; returns that folder.

    Raises:
        InputError: the folder is there already.
    """
    folder = Path(f"case-{case}")
    try:
        folder.mkdir()
    except OSError as error:
        raise InputError(
            folder, f"cannot be made: {error.strerror or error}", "remove it first"
        ) from error
    with tempfile.TemporaryDirectory() as base:
        write_case(base_sets(Path(base)), seed, case, folder)
    return folder
