"""Runs cases in a process of its own: `python -m glm5lab.fuzz.child SEED FIRST STOP STEP FOLDER`.

Prints one line of JSON a case. Its address space is limited, so that a case which asks for all
memory gets a MemoryError, which counts as a failure, instead of taking the machine down.
"""

import json
import resource
import sys
from pathlib import Path

from glm5lab.fuzz.case import run_case
from glm5lab.fuzz.draft import base_sets

ADDRESS_SPACE = 4 << 30


def main() -> None:
    """See the module."""
    seed, first, stop, step = map(int, sys.argv[1:5])
    folder = Path(sys.argv[5])
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    bases = base_sets(folder / "base")
    # What is imported on first use counts neither as a case's time nor as its open files.
    run_case(bases, seed, 0, folder / "case")
    _imports()
    print("{}", flush=True)
    for index in range(first, stop, step):
        outcome = run_case(bases, seed, index, folder / "case")
        print(json.dumps(outcome.to_json()), flush=True)


def _imports() -> None:
    import pandas  # noqa: F401

    from glm5lab.views import inspection, names, plan, tables  # noqa: F401


if __name__ == "__main__":
    main()
