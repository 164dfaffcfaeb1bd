"""The chat box, the engine's counters over time, and the table of selection, without an engine."""

import time

import pytest
from fake_openai import openai

from glm5lab.serving.client import Client
from glm5lab.views import live_server
from glm5lab.views import selection as view
from glm5lab.views.live_server import ChatBox, Meter, meter_figure


class Engine:
    """Answers chats in pieces, or refuses, and counts tokens as vLLM's /metrics does."""

    def __init__(self, pieces=("Ni", " hao", "<b>"), refuse=False, pause=0.0):
        self.pieces, self.refuse, self.pause = pieces, refuse, pause
        self.tokens, self.asked = 0, []

    def __call__(self, request):
        if request.path == "/metrics":
            request.say(
                f'vllm:generation_tokens_total{{engine="0"}} {float(self.tokens)}\n'
                'vllm:prompt_tokens_total{engine="0"} 100.0\n'
                'vllm:prompt_tokens_created{engine="0"} 1.7e9\n'
                'vllm:iteration_tokens_total_bucket{engine="0",le="8.0"} 55.0\n'
                'vllm:num_requests_running{engine="0"} 2.0\n'
                'vllm:num_requests_waiting{engine="0"} 1.0\n'
                'vllm:num_requests_waiting_by_reason{engine="0",reason="x"} 9.0\n'
                'vllm:kv_cache_usage_perc{engine="0"} 0.125\n'
            )
            return
        self.asked.append(request.body())
        if self.refuse:
            request.say({"error": {"message": "too <long>"}}, 400)
            return
        request.send_response(200)
        request.end_headers()
        for piece in self.pieces:
            time.sleep(self.pause)
            self.tokens += 1
            request.event({"choices": [{"index": 0, "delta": {"content": piece}}]})
        request.event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
        request.event("[DONE]")


def parts(box):
    """The line, the button, the conversation and the note below it."""
    row, talk, speed, _ = box.widget.children
    line, send = row.children
    return line, send, talk, speed


def test_a_chat_streams_in_and_is_remembered():
    engine = Engine()
    with openai(engine) as url:
        box = ChatBox(Client(url), {"max_tokens": 5})
        line, send, talk, speed = parts(box)
        seen = []
        talk.observe(lambda change: seen.append(change["new"]), names="value")
        line.value = "Hello & welcome"
        send.click()
        assert [text.count("assistant") for text in seen] == [1] * len(seen)
        assert len(seen) == 3  # one a piece; the last picture is the whole answer
        assert "Ni hao&lt;b&gt;" in talk.value
        assert "Hello &amp; welcome" in talk.value
        assert (line.value, send.disabled) == ("", False)
        assert "3 pieces in" in speed.value
        assert "the engine has counted 103 tokens in all" in speed.value
        line.value = "again"
        send.click()
    assert engine.asked[0]["max_tokens"] == 5
    roles = [message["role"] for message in engine.asked[1]["messages"]]
    assert roles == ["user", "assistant", "user"]


def test_the_counters_are_drawn_while_the_answer_comes():
    engine = Engine(pause=1.1 * live_server.EVERY_S)
    with openai(engine) as url:
        box = ChatBox(Client(url), {}, [(0.0, 7.0), (1.0, 9.0)])
        line, send, _, speed = parts(box)
        figure = box.widget.children[-1]
        assert figure.data[0].y == (0.0, 2.0)
        notes, drawn = [], []
        speed.observe(lambda change: notes.append(change["new"]), names="value")
        figure.data[0].on_change(lambda _, y: drawn.append(y), "y")
        line.value = "Hello"
        send.click()
    assert "2 running, 1 waiting, cache 12.5% full" in notes
    assert figure.data[0].y[0] == 0
    assert figure.data[0].y[-1] == 3
    assert len(drawn) > 1


def test_a_server_without_gauges_says_nothing_of_its_load():
    with openai(lambda request: request.say("vllm:prompt_tokens_total 1.0\n")) as url:
        assert live_server.load(Client(url)) == ""


def test_a_refusal_is_shown_and_not_remembered():
    engine = Engine(refuse=True)
    with openai(engine) as url:
        box = ChatBox(Client(url), {})
        line, send, talk, speed = parts(box)
        line.value = "Hello"
        send.click()
    assert "too &lt;long&gt;" in speed.value
    assert box.messages == []
    assert talk.value == ""
    assert not send.disabled


def test_nothing_is_sent_for_nothing():
    engine = Engine()
    with openai(engine) as url:
        line, send, *_ = parts(ChatBox(Client(url), {}))
        line.value = "  "
        send.click()
    assert engine.asked == []


def test_the_meter_samples_what_the_engine_counts():
    engine = Engine()
    with openai(engine) as url, Meter(Client(url), every_s=0.01) as meter:
        list(Client(url).stream_chat([{"role": "user", "content": "x"}]))
    assert meter.samples[0][1] == 100
    assert meter.samples[-1][1] == 103
    assert [t for t, _ in meter.samples] == sorted(t for t, _ in meter.samples)
    figure = meter_figure([(0.0, 10.0), (0.5, 12.0)])
    assert figure.data[0].y == (0.0, 2.0)
    assert meter_figure([]).data[0].y == ()


def test_without_a_person_the_counters_stand_there(monkeypatch):
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    shown = []
    monkeypatch.setattr("plotly.graph_objects.Figure.show", lambda f, **_: shown.append(f))
    live_server.chat_explorer(Client("http://127.0.0.1:9"), [(0.0, 1.0)], max_tokens=3)
    assert len(shown) == 1


ASKED: dict = {
    "12.0": {
        "with flashinfer": {
            "auto": {"native": "X", "chosen": "X", "refused": {"Y": ["sparse not supported"]}},
            "bfloat16": {
                "native": None,
                "chosen": "TRITON_MLA_SPARSE",
                "refused": {
                    "X": ["dtype", "dtype"],
                    "Y": ["Y requires <z>"],
                    "DENSE_MLA": ["ModuleNotFoundError: No module named 'w'"],
                },
            },
        }
    },
    "9.0": {"with flashinfer": {"auto": {"native": "H", "chosen": "H", "refused": {}}}},
}


def test_selection_as_a_table_with_each_reason_once():
    rows = view.selection_rows(ASKED, "12.0")
    assert rows["stock"].tolist() == ["X", "none"]
    assert rows["here"].tolist() == ["X", "TRITON_MLA_SPARSE"]
    assert rows["against"].tolist() == ["", "X: dtype; Y: requires <z>"]
    assert "X: dtype; Y: requires <z>" in view.selection_lines(rows)


def test_another_capability_is_asked_for_once(monkeypatch):
    asked: list = []
    monkeypatch.setenv("JPY_SESSION_NAME", "04.ipynb")
    monkeypatch.setattr("IPython.display.display", lambda shown: asked.append(shown))

    def answer(names):
        asked.append(names)
        return ASKED

    monkeypatch.setattr(view, "selection", answer)
    view.selection_explorer({"12.0": ASKED["12.0"]}, "12.0")
    (box,) = asked
    choice, result = box.children
    assert "serves 1 of 2 cases, 1 of them nothing else does" in result.value
    assert "&lt;z&gt;" in result.value
    choice.value = "9.0"
    assert "serves 0 of 1 cases" in result.value
    choice.value = "12.0"
    choice.value = "9.0"
    assert asked[1:] == [["9.0"]]


@pytest.mark.parametrize("capability", list(view.CAPABILITIES.values()))
def test_every_capability_offered_can_be_asked_for(capability):
    from glm5lab.selection_table import CAPABILITY

    assert CAPABILITY.fullmatch(capability)
