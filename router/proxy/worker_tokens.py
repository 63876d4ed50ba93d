"""Token ids asked of a worker, for models whose tokenizer is not to be had: ``POST /tokenize``, vLLM's and the shim's.

It delays each request by a call, so it is a setting, and bounded: so many calls at once, so many seconds each, and
after a failure none for a while. Prompts it cannot serve are keyed by their text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final

import httpx
import msgspec

from router.wire.openai import InferenceRequest

MAX_CALLS: Final = 16
RETRY_SECONDS: Final = 10.0
#: A body of more bytes a token than this, escapes and all, hardly holds a prompt that fits.
USUAL_BYTES: Final = 16
#: What of a chat request decides its prompt.
_CHAT_FIELDS: Final = ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template_kwargs")


class _Tokens(msgspec.Struct):
    tokens: list[int]


class WorkerTokenizer:
    """``url_of(model)`` is the base URL of a worker that serves it, None without one."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        *,
        url_of: Callable[[str], str | None],
        clock: Callable[[], float],
        timeout_seconds: float,
    ) -> None:
        self._client = client
        self._url_of = url_of
        self._clock = clock
        self._timeout_seconds = timeout_seconds
        self._calls = 0
        self._silent_until: dict[str, float] = {}

    async def tokens(self, request: InferenceRequest, *, model: str, most_tokens: int) -> array[int] | None:
        """The prompt's ids as a worker tells them; None where it does not, or is not asked: so not of a prompt that can
        hardly have as few as ``most_tokens``.
        """
        url = self._url_of(model)
        if url is None or self._calls >= MAX_CALLS or self._silent_until.get(model, 0.0) > self._clock():
            return None
        if len(request.body) > USUAL_BYTES * most_tokens or (question := _question(request, model=model)) is None:
            return None
        self._calls += 1
        try:
            answer = await self._client.post(f"{url}/tokenize", content=question, timeout=self._timeout_seconds)
            if answer.status_code < 500 and answer.status_code not in (404, 405, 429) and answer.is_error:
                return None  # about this request, which the worker will refuse again
            answer.raise_for_status()
            return array("I", msgspec.json.decode(answer.content, type=_Tokens).tokens)
        except (httpx.HTTPError, msgspec.DecodeError, OverflowError):
            self._silent_until[model] = self._clock() + RETRY_SECONDS
            return None
        finally:
            self._calls -= 1


def _question(request: InferenceRequest, *, model: str) -> bytes | None:
    """The body of the call; None for requests without one prompt, or nested too deep to be told on."""
    asked: dict[str, object] = {"model": model}
    prompt = request.prompt
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if request.chat is not None:
        asked |= {name: request.chat[name] for name in _CHAT_FIELDS if request.chat.get(name) is not None}
    elif isinstance(prompt, str):
        asked["prompt"] = prompt
    else:
        return None
    try:
        return msgspec.json.encode(asked)
    except RecursionError:
        return None
