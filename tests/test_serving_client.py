"""The client: streams, and what it says about everything that goes wrong."""

import threading

import pytest
from fake_openai import openai

from glm5lab.serving.client import Client, ClientError

QUESTION = [{"role": "user", "content": "Hello"}]
STREAM = {"chat": lambda c: c.stream_chat(QUESTION), "text": lambda c: c.stream_completion("x")}


def piece(text):
    return {"choices": [{"text": text, "delta": {"content": text}}]}


@pytest.mark.parametrize("kind", STREAM)
def test_a_stream_comes_piece_by_piece(kind):
    def answer(request):
        request.body()
        request.send_response(200)
        request.end_headers()
        request.wfile.write(b": a comment\n\n")
        for text in ("a", "", "b"):
            request.event(piece(text))
        request.event("[DONE]")

    with openai(answer) as url:
        assert list(STREAM[kind](Client(f"{url}/v1"))) == ["a", "b"]


def test_a_stream_without_its_end_is_an_error_after_what_came():
    def answer(request):
        request.body()
        request.send_response(200)
        request.end_headers()
        request.event(piece("a"))

    with openai(answer) as url:
        pieces: list[str] = []
        with pytest.raises(ClientError, match=r"after 1 pieces the stream was cut \(it ended wit"):
            pieces += iter(Client(url).stream_chat(QUESTION))
        stream = Client(url).stream_chat(QUESTION)
        assert next(stream) == "a"


def test_a_stream_cut_in_a_chunk_is_an_error():
    def answer(request):
        request.body()
        request.protocol_version = "HTTP/1.1"
        request.send_response(200)
        request.send_header("Transfer-Encoding", "chunked")
        request.end_headers()
        request.wfile.write(b"ff\r\ndata: {")
        request.wfile.flush()

    with openai(answer) as url, pytest.raises(ClientError, match="after 0 pieces the stream was"):
        list(Client(url).stream_chat(QUESTION))


def test_an_error_in_a_stream_is_said():
    def answer(request):
        request.body()
        request.send_response(200)
        request.end_headers()
        request.event(piece("a"))
        request.event({"error": {"message": "EngineCore encountered an issue"}})

    with openai(answer) as url, pytest.raises(ClientError, match="after 1 pieces: EngineCore enc"):
        list(Client(url).stream_chat(QUESTION))


def test_an_answer_that_the_server_gave_up_is_no_answer():
    """As vLLM ends the requests under way when it is stopped."""
    given_up = {"choices": [{"text": "a", "delta": {}, "finish_reason": "abort"}]}

    def answer(request):
        if not request.body().get("stream"):
            return request.say(given_up)
        request.send_response(200)
        request.end_headers()
        request.event(piece("a"))
        request.event(given_up)
        return request.event("[DONE]")

    with openai(answer) as url:
        client, said = Client(url), r"the server gave the request up \(abort\)"
        with pytest.raises(ClientError, match="after 2 pieces: " + said):
            list(client.stream_completion("x"))
        with pytest.raises(ClientError, match="/v1/completions: " + said):
            client.completion("x")


@pytest.mark.parametrize("begun", [False, True], ids=["answer", "stream"])
def test_silence_is_a_timeout_that_says_how_long(begun):
    done = threading.Event()

    def answer(request):
        request.body()
        if begun:
            request.send_response(200)
            request.end_headers()
            request.event(piece("a"))
        done.wait(20)

    with openai(answer) as url:
        client = Client(url, timeout_s=0.3)
        if begun:
            with pytest.raises(ClientError, match=r"after 1 pieces no byte came for 0\.3 s"):
                list(client.stream_chat(QUESTION))
        else:
            with pytest.raises(ClientError, match=r"no answer within 0.3 s; the server is busy"):
                client.chat(QUESTION)
        done.set()


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (401, {"error": "Unauthorized"}, r"401 .*: Unauthorized; give the server's API key: Cli"),
        (404, {"error": {"message": "no model `x`"}}, r"404 .*no model `x`; the server has tiny"),
        (400, {"error": {"message": "maximum context length is 4096"}}, "400 .*context length is"),
        (500, "<html>", "500 .*<html>"),
        (429, {"error": {"message": "a\x1b[2J\nb"}}, r"429 .*a\\x1b\[2J\\nb"),
    ],
)
def test_a_refusal_is_repeated_with_what_helps(status, body, says):
    with openai(lambda request: request.say(body, status)) as url:
        with pytest.raises(ClientError, match=says) as caught:
            Client(url, model="x").chat(QUESTION)
        assert caught.value.status == status
        assert str(caught.value).startswith(f"POST {url}/v1/chat/completions: {status} ")


def test_other_servers_and_no_servers():
    wrong = pytest.raises(ClientError, match="not JSON but '<html>hello'; is this an OpenAI")
    with openai(lambda request: request.say("<html>hello")) as url, wrong:
        Client(url).completion("x")
    with pytest.raises(ClientError, match=r"no answer \(.*refused\); does the server run\?"):
        Client(url).chat(QUESTION)
    with pytest.raises(ClientError, match="localhost:8000: no URL; write http://HOST:PORT"):
        Client("localhost:8000").models()


def test_the_key_travels_as_a_bearer_token():
    seen = []

    def answer(request):
        seen.append(request.headers["Authorization"])
        request.body()
        request.say({"choices": [{"text": "a"}]})

    with openai(answer) as url:
        assert Client(url, api_key="secret").completion([1, 2]) == "a"
        assert Client(url).completion("x") == "a"
    assert seen == ["Bearer secret", None]
