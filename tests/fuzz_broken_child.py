"""The fuzzer's child over a reader with every fault that the fuzzer has to notice."""

import os
import sys
import time
from typing import Any

from glm5lab.fuzz import case, child
from glm5lab.gguf import reader

FAULTS = {3: "raise", 5: "exit", 7: "handle", 9: "hang", 11: "memory"}


def main() -> None:
    sound, run = reader.open_gguf, case.run_case
    index = -1

    def broken(*args: Any, **options: Any) -> Any:
        fault = FAULTS.get(index)
        if fault == "raise":
            raise KeyError("blk.0")
        if fault == "exit":
            sys.stderr.write("out of luck")
            sys.stderr.flush()
            os._exit(3)
        if fault == "handle":
            os.open("/dev/null", os.O_RDONLY)
        if fault == "hang":
            time.sleep(1000)
        if fault == "memory":
            assert b"\1" * 520_000_000
        return sound(*args, **options)

    def numbered(bases: Any, seed: int, number: int, folder: Any) -> Any:
        nonlocal index
        index = number
        return run(bases, seed, number, folder)

    vars(reader)["open_gguf"] = broken
    vars(child)["run_case"] = numbered
    child.main()


if __name__ == "__main__":
    main()
