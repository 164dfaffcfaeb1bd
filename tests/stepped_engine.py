"""An engine for tests of what steps one: no model, no vLLM."""

from types import SimpleNamespace
from typing import Any


class Engine:
    """Answers every request with its prompt's first tokens, a token a step; some at a time."""

    def __init__(self):
        self.requests: dict[str, Any] = {}

    def add_request(self, name, prompt, sampling):
        tokens = prompt["prompt_token_ids"] * sampling.max_tokens
        self.requests[name] = [tokens[: sampling.max_tokens], 0, prompt["prompt_token_ids"]]

    def abort_request(self, names):
        for name in names:
            del self.requests[name]

    def has_unfinished_requests(self):
        return bool(self.requests)

    def step(self):
        outputs = []
        for name in list(self.requests)[:64]:
            tokens, made, prompt = self.requests[name]
            self.requests[name][1] = made + 1
            steps = [{t: SimpleNamespace(logprob=-1.0)} for t in tokens[: made + 1]]
            one = SimpleNamespace(token_ids=tokens[: made + 1], logprobs=steps)
            asked = [{t: SimpleNamespace(logprob=-1.0)} for t in prompt]
            done = made + 1 == len(tokens)
            outputs.append(
                SimpleNamespace(
                    request_id=name, finished=done, outputs=[one], prompt_logprobs=asked
                )
            )
            if done:
                del self.requests[name]
        return outputs
