"""Chromium for tests and pictures: where it is, and how it is started through playwright."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
# A browser that talks to nobody but the pages it is sent to; as root it cannot have its sandbox.
ARGUMENTS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--disable-dev-shm-usage",
)
INSTALL = "no Chromium on the path: apt-get install chromium"


def chromium() -> str | None:
    """The path of an installed Chromium, None where there is none."""
    return next((path for path in map(shutil.which, NAMES) if path), None)


@contextmanager
def browser() -> Iterator[Browser]:
    """A headless Chromium, closed at the end.

    Raises:
        RuntimeError: none is installed; the message names the command that installs it.
    """
    from playwright.sync_api import sync_playwright

    path = chromium()
    if path is None:
        raise RuntimeError(INSTALL)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        try:
            yield started
        finally:
            started.close()
