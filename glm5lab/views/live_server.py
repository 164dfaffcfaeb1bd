"""A served model in a notebook: a chat box whose answers stream in, and the engine's counters."""

import threading
import time
import warnings
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from glm5lab.serving.client import Client, ClientError
from glm5lab.serving.watch import counters, metrics, values
from glm5lab.views.live import LIVE_WIDTH, show

if TYPE_CHECKING:
    import plotly.graph_objects as go

Sample = tuple[float, float]  # seconds since the first, tokens processed
EVERY_S = 0.25
COUNTERS = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total")
# Requests that run, those that wait, and how full the cache is.
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
PERSON, MODEL = "#0072B2", "#009E73"


def tokens(client: Client) -> float | None:
    """Prompt and output tokens that the engine has counted; None where it does not say."""
    found = counters(client, COUNTERS)
    return sum(found) if found else None


def load(client: Client) -> str:
    """Requests that run and wait, and how full the cache is; "" where the server does not say."""
    lines = metrics(client)
    found = [values(lines, f"{gauge}{{") for gauge in GAUGES]
    if not all(found):
        return ""
    running, waiting, cache = map(sum, found)
    return f"{running:.0f} running, {waiting:.0f} waiting, cache {cache:.1%} full"


class Meter:
    """Samples a server's counters of processed tokens while its context is open.

    Args:
        client: for the server.
        every_s: seconds between samples.

    Attributes:
        samples: what was seen, oldest first.
    """

    def __init__(self, client: Client, every_s: float = EVERY_S) -> None:
        self.client, self.every_s = client, every_s
        self.samples: list[Sample] = []
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Meter":
        self._began = time.monotonic()
        self._sample()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()
        self._sample()

    def _sample(self) -> None:
        found = tokens(self.client)
        if found is not None:
            self.samples.append((time.monotonic() - self._began, found))

    def _run(self) -> None:
        while not self._end.wait(self.every_s):
            self._sample()


def meter_figure(samples: Sequence[Sample]) -> "go.Figure":
    """Tokens that the engine has processed since the first sample, over time."""
    import plotly.graph_objects as go

    first = samples[0][1] if samples else 0.0
    figure = go.Figure(
        go.Scatter(
            x=[round(t, 2) for t, _ in samples],
            y=[n - first for _, n in samples],
            mode="lines+markers",
            line={"color": PERSON, "shape": "hv"},
            hovertemplate="%{x:.1f} s: %{y} tokens<extra></extra>",
        )
    )
    figure.update_layout(
        title="Counted by the engine while it answered",
        xaxis={"title": "seconds", "rangemode": "tozero"},
        yaxis={"title": "prompt and output tokens", "rangemode": "tozero"},
        template="plotly_white",
        height=320,
        margin={"t": 60, "b": 60, "l": 70, "r": 20},
    )
    return figure


def chat_explorer(client: Client, samples: Sequence[Sample], **settings: Any) -> None:
    """A chat box with the engine's counters below; without a person, the counters' figure.

    Args:
        client: for a server that is ready.
        samples: of a `Meter`, for the figure.
        settings: of the request, such as max_tokens.
    """
    show(meter_figure(samples), lambda: ChatBox(client, settings, samples).widget)


class ChatBox:
    """The chat: a line to write, a button, the conversation, the engine's counters as they move.

    Args:
        client: for a server that is ready.
        settings: of the request.
        samples: of a `Meter`, drawn until a question is asked.

    Attributes:
        widget: what to display.
        messages: the conversation so far.
    """

    def __init__(
        self, client: Client, settings: dict[str, Any], samples: Sequence[Sample] = ()
    ) -> None:
        import ipywidgets as w
        import plotly.graph_objects as go

        self.client, self.settings = client, settings
        self.messages: list[dict[str, str]] = []
        self._line = w.Text(placeholder="ask something", layout={"width": "70%"})
        self._send = w.Button(description="send", button_style="primary")
        self._talk, self._speed = w.HTML(), w.HTML("the server is ready")
        self._figure = go.FigureWidget(meter_figure(samples)).update_layout(width=LIVE_WIDTH)
        self._send.on_click(lambda _: self.send(self._line.value))
        with warnings.catch_warnings():
            # Called deprecated, but what its note names instead sends on every loss of focus, too.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._line.on_submit(lambda _: self.send(self._line.value))
        row = w.HBox([self._line, self._send])
        self.widget = w.VBox([row, self._talk, self._speed, self._figure])

    def send(self, text: str) -> None:
        """Ask, and show the answer piece by piece; an error is shown in the server's words."""
        if not text.strip() or self._send.disabled:
            return
        self._send.disabled = True
        self._line.value = ""
        self.messages.append({"role": "user", "content": text})
        try:
            self._answer()
        except ClientError as error:
            self._speed.value = f"<b>refused:</b> {escape(str(error))}"
            self.messages.pop()
            self._show()
        finally:
            self._send.disabled = False

    def _answer(self) -> None:
        began, pieces = time.monotonic(), []
        first = drawn = 0.0
        with Meter(self.client) as meter:
            for piece in self.client.stream_chat(self.messages, **self.settings):
                now = time.monotonic() - began
                first = first or now
                pieces.append(piece)
                self._show("".join(pieces))
                if now - drawn > EVERY_S:
                    drawn = now
                    self._draw(meter.samples)
                    self._speed.value = load(self.client)
            took = time.monotonic() - began
        self._draw(meter.samples)
        self.messages.append({"role": "assistant", "content": "".join(pieces)})
        self._show()
        count = tokens(self.client)
        counted = "" if count is None else f"; the engine has counted {count:,.0f} tokens in all"
        self._speed.value = (
            f"first piece after {first * 1000:.0f} ms, {len(pieces)} pieces in {took:.1f} s"
            f"{counted}"
        )

    def _draw(self, samples: Sequence[Sample]) -> None:
        line = meter_figure(samples).data[0]
        with self._figure.batch_update():
            self._figure.data[0].x, self._figure.data[0].y = line.x, line.y

    def _show(self, answer: str | None = None) -> None:
        turns = [(m["role"], m["content"]) for m in self.messages]
        turns += [("assistant", answer)] if answer is not None else []
        self._talk.value = "".join(
            f"<div style='margin:4px 0;max-width:900px;overflow-wrap:anywhere'>"
            f"<b style='color:{PERSON if role == 'user' else MODEL}'>{role}</b> {escape(content)}"
            "</div>"
            for role, content in turns
        )
