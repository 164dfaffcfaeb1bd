"""JupyterLab on copies of the notebooks, and Chromium in front of it, as a person has both."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOKEN = "test-only"
START_S, RUN_S = 120, 300
SETTINGS = {
    # All outputs are drawn, seen or not; nobody is asked about news.
    "notebook-extension/tracker": {"windowingMode": "none"},
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}
# What JupyterLab itself reports on this page, whatever the notebook does.
NOT_OURS = ("favicon", "ERR_INTERNET_DISCONNECTED", "jupyterlab/lsp", "/lsp/")
OUTPUTS = ".jp-Notebook .jp-OutputArea-output"


@contextmanager
def jupyterlab(folder: Path) -> Iterator[str]:
    """JupyterLab on copies of notebooks/ in a folder; its address. Stopped at the end."""
    copies = folder / "notebooks"
    copies.mkdir(parents=True)
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        shutil.copy(path, copies)
    for name, content in SETTINGS.items():
        path = folder / "settings" / "@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(content))
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "JUPYTER_PREFER_ENV_PATH": "1",
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
        "JUPYTER_RUNTIME_DIR": str(folder / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(folder / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(folder / "workspaces"),
    }
    line = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--port=0"]
    line += ["--ip=127.0.0.1", "--expose-app-in-browser", f"--IdentityProvider.token={TOKEN}"]
    line += [f"--ServerApp.root_dir={copies}", "--ServerApp.port_retries=0"]
    log = folder / "jupyterlab.log"
    with log.open("w") as output:
        server = subprocess.Popen(
            line, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        yield _address(server, folder / "runtime", log)
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def _address(server: Any, runtime: Path, log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        for path in runtime.glob("jpserver-*.json"):
            try:
                found = json.loads(path.read_text())
            except ValueError:
                continue  # it is being written
            return f"http://127.0.0.1:{found['port']}"
        time.sleep(0.2)
    raise AssertionError(f"JupyterLab did not start: {log.read_text()[-2000:]}")


class Lab:
    """A browser page with one notebook.

    Attributes:
        page: playwright's.
        errors: what the console reported as errors, and uncaught exceptions.
    """

    def __init__(self, browser: Any, address: str, notebook: str) -> None:
        self.page = browser.new_page(viewport={"width": 1280, "height": 1000})
        self.errors: list[str] = []
        self.page.set_default_timeout(START_S * 1000)
        self.page.on("console", self._console)
        self.page.on("pageerror", lambda error: self.errors.append(f"uncaught: {error}"))
        self.page.goto(f"{address}/lab/tree/{notebook}?token={TOKEN}&reset")
        self.page.wait_for_selector(".jp-Notebook .jp-Cell")
        self.page.evaluate("jupyterapp.commands.execute('application:toggle-left-area')")

    def _console(self, message: Any) -> None:
        said = f"{message.text} ({(message.location or {}).get('url', '')})"
        if message.type == "error" and not any(word in said for word in NOT_OURS):
            self.errors.append(said)

    def run_all(self) -> None:
        """Run all cells and wait until the last one has run."""
        kernel = "jupyterapp.shell.currentWidget.sessionContext"
        self.page.wait_for_function(f"{kernel}.session?.kernel?.status === 'idle'")
        self.page.set_default_timeout(RUN_S * 1000)
        self.page.evaluate("jupyterapp.commands.execute('notebook:run-all-cells')")
        self.page.wait_for_function(
            f"{kernel}.session.kernel.status === 'idle' && "
            "![...document.querySelectorAll('.jp-Notebook .jp-InputPrompt')]"
            ".some(prompt => prompt.textContent.includes('*'))"
        )
        self.page.wait_for_timeout(1500)  # figures draw themselves
        self.page.set_default_timeout(START_S * 1000)

    def counts(self) -> list[str]:
        """What stands in the brackets of each code cell."""
        return self.page.eval_on_selector_all(
            ".jp-Notebook .jp-CodeCell .jp-InputPrompt",
            "prompts => prompts.map(p => p.textContent.replace(/[^0-9*]/g, ''))",
        )

    def failures(self) -> list[str]:
        """Texts of error outputs, and of outputs that JupyterLab could not draw."""
        kinds = ("application/vnd.jupyter.error", "application/vnd.jupyter.stderr")
        chosen = ",".join(f'{OUTPUTS}[data-mime-type="{kind}"]' for kind in kinds)
        texts = self.page.eval_on_selector_all(chosen, "all => all.map(e => e.textContent)")
        body = self.page.inner_text(".jp-Notebook")
        signs = ("Error displaying widget", "Error creating widget", "model not found")
        return [*texts, *(sign for sign in signs if sign in body)]

    def slide(self, description: str, key: str, times: int = 1) -> None:
        """Move a slider by keys, as with focus on its handle."""
        row = self.page.locator(".widget-slider", has_text=description).first
        handle = row.locator(".noUi-handle")
        handle.focus()
        for _ in range(times):
            handle.press(key)
        self.page.wait_for_timeout(1500)

    def picture(self, path: Path, theme: str) -> None:
        """The whole notebook in JupyterLab's light or dark theme."""
        name = f"JupyterLab {theme.title()}"
        self.page.evaluate(
            "name => jupyterapp.commands.execute('apputils:change-theme', {theme: name})", name
        )
        light = str(theme == "light").lower()
        self.page.wait_for_selector(f"body[data-jp-theme-light='{light}']", state="attached")
        height = self.page.evaluate(
            "[...document.querySelectorAll('.jp-Notebook .jp-Cell')]"
            ".reduce((sum, cell) => sum + cell.offsetHeight + 12, 200)"
        )
        self.page.set_viewport_size({"width": 1280, "height": min(int(height), 12000)})
        self.page.evaluate(
            "for (const e of document.querySelectorAll('.jp-WindowedPanel-outer, .jp-Notebook'))"
            " e.scrollTop = 0"
        )
        self.page.wait_for_timeout(800)
        self.page.screenshot(path=path)

    def clipped(self) -> list[str]:
        """Figures and widgets that are wider than the output they lie in."""
        return self.page.eval_on_selector_all(
            f"{OUTPUTS} .js-plotly-plot, {OUTPUTS} .jupyter-widgets",
            "all => all.filter(e => e.getBoundingClientRect().right > "
            "e.closest('.jp-OutputArea-output').getBoundingClientRect().right + 2)"
            ".map(e => e.className)",
        )

    def close(self) -> None:
        """Shut the kernel down and the page."""
        self.page.evaluate("jupyterapp.shell.currentWidget.sessionContext.shutdown()")
        self.page.close()
