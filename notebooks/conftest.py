"""How `make notebooks` runs the notebooks: what pytest.ini cannot say."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import nbval.kernel
import pytest

HERE = Path(__file__).resolve().parent
GPU_ONLY, REASON = "gpu-only", "# GPU only: "
POLL = 0.5  # seconds between two looks at a kernel that has not answered


class KernelDiedError(Exception):
    """A notebook's kernel ended while a cell ran."""


def pytest_configure(config: pytest.Config) -> None:
    """The contract is that of the sample, in the repository's own kernel, without a browser."""
    config.option.nbval_sanitize_with = str(HERE / "sanitize.cfg")
    for name in ("GLM5LAB_FILE", "JPY_SESSION_NAME"):
        os.environ.pop(name, None)
    os.environ["JUPYTER_PREFER_ENV_PATH"] = "1"
    nbval.kernel.RunningKernel.await_reply = await_reply


def await_reply(kernel: Any, msg_id: str, timeout: float | None = None) -> None:
    """nbval's own, but for a kernel that died: that is noticed at once, not at the time limit."""
    deadline = None if timeout is None else time.monotonic() + timeout
    while True:
        try:
            reply = kernel.get_message(stream="shell", timeout=POLL)
        except Empty:
            if not kernel.is_alive():
                raise KernelDiedError("the kernel died while this cell ran") from None
            if deadline is not None and time.monotonic() > deadline:
                raise
            continue
        if reply["parent_header"].get("msg_id") == msg_id:
            if reply["content"]["status"] == "aborted":
                raise RuntimeError("the kernel refused to run this cell")
            return


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Cells tagged gpu-only are skipped without a GPU, for the reason in their first line."""
    marked = [item for item in items if GPU_ONLY in _cell(item).metadata.get("tags", [])]
    if not marked:
        return
    import torch

    for item in marked:
        first = _cell(item).source.partition("\n")[0]
        if not first.startswith(REASON):
            raise pytest.UsageError(f"{item.nodeid}: a gpu-only cell begins with `{REASON}why`")
        if not torch.cuda.is_available():
            reason = f"needs a CUDA device: {first.removeprefix(REASON)}"
            item.add_marker(pytest.mark.skip(reason=reason))


def _cell(item: Any) -> Any:
    return item.cell


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: Any) -> Iterator[None]:
    """After a cell has killed the kernel the rest of its notebook is not tried."""
    yield
    kernel = item.parent.kernel
    if kernel is not None and not kernel.is_alive():
        pytest.skip("the kernel died in a cell above")
