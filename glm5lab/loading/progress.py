"""How far a load is: a bar on a terminal, a line every some seconds in a log."""

import logging
import sys
import time
from typing import Any

GIB = 1 << 30
MIB = 1 << 20
SAY_S = 10.0


class Progress:
    """Counts bytes of the files and says where they belong.

    Args:
        total: bytes that will be loaded.
        logger: for the lines.
        show: whether this rank shows anything before it is done.
        label: begins every line, such as "rank 1 of 8".
    """

    def __init__(self, total: int, logger: logging.Logger, show: bool, label: str) -> None:
        self.total, self.done, self.logger, self.label = total, 0, logger, label
        self.began = self._said = time.monotonic()
        self._show = show
        self._bar: Any = None
        if show and sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=total, unit="B", unit_scale=True, desc="Loading", leave=False)

    @property
    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self.began

    def add(self, nbytes: int, name: str) -> None:
        """Some more bytes, of the tensor `name`."""
        self.done += nbytes
        place = ".".join(name.split(".")[:2]) if name.startswith("blk.") else name
        if self._bar is not None:
            self._bar.set_postfix_str(place, refresh=False)
            self._bar.update(nbytes)
        elif self._show and time.monotonic() - self._said >= SAY_S:
            self._said = time.monotonic()
            # Like a bar, which `glm5lab serve` reads.
            percent = 100 * self.done // max(1, self.total)
            self.logger.info("Loading: %3d%%| %s, %s, at %s", percent, self, self.label, place)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.close()

    def __str__(self) -> str:
        """Bytes of all bytes, seconds, rate."""
        large = self.total >= GIB
        unit, name = (GIB, "GiB") if large else (MIB, "MiB")
        rate = self.done / MIB / max(self.seconds, 1e-3)
        return (
            f"{self.done / unit:.1f} of {self.total / unit:.1f} {name} in {self.seconds:.1f} s "
            f"({rate:,.0f} MiB/s)"
        )
