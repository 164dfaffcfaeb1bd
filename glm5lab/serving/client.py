"""A small client for an OpenAI endpoint, on the standard library alone.

client = Client("http://127.0.0.1:8000")
client.chat([{"role": "user", "content": "Hello"}], max_tokens=20)
for piece in client.stream_chat([{"role": "user", "content": "Hello"}]):
    print(piece, end="")

Whatever fails is a ClientError that says what to do.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Sequence
from typing import Any

from glm5lab.errors import Glm5labError, printable

Message = dict[str, str]
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONGEST = 500  # characters of a server's words that are repeated


class ClientError(Glm5labError):
    """A request failed; the message names method, URL, status and the server's words.

    Attributes:
        status: HTTP status, or None when there was no answer, or only a part of one.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Client:
    """Requests to one server.

    Args:
        url: of the server, with or without /v1.
        model: name to ask for; None takes the first that the server lists.
        timeout_s: seconds without a byte from the server.
        api_key: sent as bearer token.

    Raises:
        ClientError: the URL is none.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        timeout_s: float = 600.0,
        api_key: str | None = None,
    ) -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        if not self.url.startswith(("http://", "https://")):
            raise ClientError(f"{printable(url)}: no URL; write http://HOST:PORT")
        self.timeout_s, self.api_key = timeout_s, api_key
        self._model = model
        # A proxy for the web does not reach a server on this machine.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    @property
    def model(self) -> str:
        """The name that requests ask for."""
        if self._model is None:
            names = self.models()
            if not names:
                raise ClientError(f"GET {self.url}/v1/models: the server lists no model")
            self._model = names[0]
        return self._model

    def healthy(self) -> bool:
        """Whether the server answers and says that its engine runs."""
        try:
            self.text("/health")
        except ClientError:
            return False
        return True

    def models(self) -> list[str]:
        """Names that the server answers to."""
        return [entry["id"] for entry in self._json("/v1/models", None)["data"]]

    def roots(self) -> dict[str, str]:
        """Where the server found the model behind each name."""
        entries = self._json("/v1/models", None)["data"]
        return {entry["id"]: str(entry.get("root") or "") for entry in entries}

    def text(self, path: str) -> str:
        """What the server says at a path, such as /metrics."""
        return self._read(path, None).decode(errors="replace")

    def completion(self, prompt: str | Sequence[int], **options: Any) -> str:
        """The text after a prompt (text or token ids); options as in OpenAI's API."""
        return str(self.complete(prompt, **options)["text"])

    def complete(self, prompt: str | Sequence[int], **options: Any) -> dict[str, Any]:
        """As `completion`, with all that the server says: log-probabilities, finish_reason."""
        body = {"model": self.model, "prompt": prompt, **options}
        return self._choice(COMPLETIONS, body)

    def chat(self, messages: Sequence[Message], **options: Any) -> str:
        """The assistant's answer to a conversation."""
        body = {"model": self.model, "messages": list(messages), **options}
        return self._choice(CHAT, body)["message"]["content"] or ""

    def stream_completion(
        self, prompt: str | Sequence[int], **options: Any
    ) -> Generator[str, None, None]:
        """As `completion`, piece by piece; closing the generator ends the request."""
        body = {"model": self.model, "prompt": prompt, **options}
        for choice in self._stream(COMPLETIONS, body):
            if piece := choice.get("text"):
                yield piece

    def stream_chat(
        self, messages: Sequence[Message], **options: Any
    ) -> Generator[str, None, None]:
        """As `chat`, piece by piece; closing the generator ends the request."""
        body = {"model": self.model, "messages": list(messages), **options}
        for choice in self._stream(CHAT, body):
            if piece := choice["delta"].get("content"):
                yield piece

    def _stream(self, path: str, body: dict[str, Any]) -> Generator[dict[str, Any], None, None]:
        """The choices of each event until the server says [DONE]."""
        where = f"POST {self.url}{path}"
        count = 0
        try:
            with self._open(path, {**body, "stream": True}) as answer:
                for line in answer:
                    kind, _, data = line.decode(errors="replace").strip().partition(": ")
                    if kind != "data":
                        continue
                    if data == "[DONE]":
                        return
                    event = json.loads(data)
                    if "error" in event:
                        raise ClientError(f"{where}: after {count} pieces: {_words(data.encode())}")
                    count += 1
                    for choice in event["choices"]:
                        yield _given_up(f"{where}: after {count} pieces", choice)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise self._cut(where, count, error) from error
        raise self._cut(where, count, None)

    def _cut(self, where: str, count: int, error: Exception | None) -> ClientError:
        if isinstance(error, TimeoutError):
            why = f"no byte came for {self.timeout_s:g} s; the server is busy or stuck"
        else:
            why = f"the stream was cut ({_reason(error) if error else 'it ended without [DONE]'})"
            why += "; the server has ended, or something between has"
        return ClientError(f"{where}: after {count} pieces {why}")

    def _choice(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The first choice of a whole answer."""
        return _given_up(f"POST {self.url}{path}", self._json(path, body)["choices"][0])

    def _json(self, path: str, body: dict[str, Any] | None) -> Any:
        answer = self._read(path, body)
        try:
            return json.loads(answer)
        except ValueError as error:
            method = "GET" if body is None else "POST"
            said = printable(answer[:80].decode(errors="replace"))
            raise ClientError(
                f"{method} {self.url}{path}: not JSON but {said!r}; is this an OpenAI endpoint?"
            ) from error

    def _read(self, path: str, body: dict[str, Any] | None) -> bytes:
        method = "GET" if body is None else "POST"
        try:
            with self._open(path, body) as answer:
                return answer.read()
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(f"{method} {self.url}{path}", error) from error

    def _open(self, path: str, body: dict[str, Any] | None) -> http.client.HTTPResponse:
        """The answer to a GET, or to a POST of a JSON body; ClientError for everything else."""
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        where = f"{request.get_method()} {request.full_url}"
        try:
            return self._opener.open(request, timeout=self.timeout_s)
        except urllib.error.HTTPError as error:
            raise self._refused(where, error, body) from error
        except (OSError, http.client.HTTPException) as error:
            raise self._no_answer(where, error) from error

    def _refused(
        self, where: str, error: urllib.error.HTTPError, body: dict[str, Any] | None
    ) -> ClientError:
        """An answer with an error's status, and what helps against it."""
        try:
            said = _words(error.read())
        except (OSError, http.client.HTTPException):
            said = "(cut)"
        text = f"{where}: {error.code} {error.reason}: {said}"
        if error.code == 401:
            text += "; give the server's API key: Client(url, api_key=...)"
        elif error.code == 404 and body and "model" in body:
            text += f"; {self._known_models()}"
        return ClientError(text, error.code)

    def _known_models(self) -> str:
        try:
            return f"the server has {', '.join(self.models())}"
        except ClientError:
            return "the server lists no models; is this an OpenAI endpoint?"

    def _no_answer(self, where: str, error: Exception) -> ClientError:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            why = f"no answer within {self.timeout_s:g} s; the server is busy or stuck"
            return ClientError(f"{where}: {why}, or timeout_s is too short")
        return ClientError(f"{where}: no answer ({_reason(reason)}); does the server run?")


def _given_up(where: str, choice: dict[str, Any]) -> dict[str, Any]:
    """The choice itself; ClientError where the server did not finish it, as when it is stopped."""
    reason = choice.get("finish_reason")
    if reason in ("abort", "error"):
        raise ClientError(f"{where}: the server gave the request up ({reason}); was it stopped?")
    return choice


def _reason(error: object) -> str:
    return printable(str(error)) or type(error).__name__


def _words(body: bytes) -> str:
    """What a server says in an error's body."""
    try:
        error = json.loads(body)["error"]
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        text = body.decode(errors="replace").strip()
    return printable(text)[:LONGEST]
