"""A small client for an OpenAI endpoint, on the standard library alone.

client = Client("http://127.0.0.1:8000")
client.chat([{"role": "user", "content": "Hello"}], max_tokens=20)

Whatever fails is a ClientError.
"""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any

from glm5lab.errors import Glm5labError

Message = dict[str, str]


class ClientError(Glm5labError):
    """A request failed; the message names method, URL, status and the server's words.

    Attributes:
        status: HTTP status, or None when there was no answer.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Client:
    """Requests to one server.

    Args:
        url: of the server, without /v1.
        model: name to ask for; None takes the first that the server lists.
        timeout_s: seconds without a byte from the server.
        api_key: sent as bearer token.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        timeout_s: float = 600.0,
        api_key: str | None = None,
    ) -> None:
        self.url = url.rstrip("/")
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
            with self._open("/health", None):
                return True
        except ClientError:
            return False

    def models(self) -> list[str]:
        """Names that the server answers to."""
        return [entry["id"] for entry in self._json("/v1/models", None)["data"]]

    def completion(self, prompt: str | Sequence[int], **options: Any) -> str:
        """The text after a prompt (text or token ids); options as in OpenAI's API."""
        body = {"model": self.model, "prompt": prompt, **options}
        return self._json("/v1/completions", body)["choices"][0]["text"]

    def chat(self, messages: Sequence[Message], **options: Any) -> str:
        """The assistant's answer to a conversation."""
        body = {"model": self.model, "messages": list(messages), **options}
        return self._json("/v1/chat/completions", body)["choices"][0]["message"]["content"] or ""

    def stream_chat(self, messages: Sequence[Message], **options: Any) -> Iterator[str]:
        """The assistant's answer piece by piece, as the server sends it."""
        body = {"model": self.model, "messages": list(messages), "stream": True, **options}
        with self._open("/v1/chat/completions", body) as answer:
            for line in answer:
                data = line.decode().strip().removeprefix("data: ")
                if data in ("", "[DONE]"):
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise ClientError(
                        f"POST {self.url}/v1/chat/completions: {_words(data.encode())}"
                    )
                for choice in event["choices"]:
                    if piece := choice["delta"].get("content"):
                        yield piece

    def _json(self, path: str, body: dict[str, Any] | None) -> Any:
        with self._open(path, body) as answer:
            return json.loads(answer.read())

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
            said = _words(error.read())
            raise ClientError(
                f"{where}: {error.code} {error.reason}: {said}", error.code
            ) from error
        except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise ClientError(f"{where}: no answer ({reason}); does the server run?") from error


def _words(body: bytes) -> str:
    """What a server says in an error's body."""
    try:
        error = json.loads(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, KeyError, TypeError):
        return body.decode(errors="replace").strip()[:300]
