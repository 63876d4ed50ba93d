"""Token ids asked of a worker, for models whose tokenizer is not to be had: ``POST /tokenize``, vLLM's and the shim's.

It delays each request by a call, so it is a setting, and bounded: so many calls at once, so many seconds each from the
question to the last byte, and after a failure none for a while. Prompts it cannot serve are keyed by their text.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final

import httpx
import msgspec

from router.fleet.asking import Answer, ask
from router.proxy import eager
from router.wire.openai import InferenceRequest

MAX_CALLS: Final = 16
RETRY_SECONDS: Final = 10.0
#: A body of more bytes a token than this, escapes and all, hardly holds a prompt that fits.
USUAL_BYTES: Final = 16
#: Of an answer: for each token that fits, and for what else it says. An id has seven digits.
_TOKEN_BYTES: Final = 16
_OTHER_BYTES: Final = 64 * 1024
#: What a worker says of a request that it would refuse again, as it will when it is sent.
_REFUSALS: Final = frozenset({400, 413, 422})
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
            await eager.in_task()
            answer: Answer | None = await ask(
                self._client,
                f"{url}/tokenize",
                method="POST",
                body=question,
                most_bytes=_TOKEN_BYTES * most_tokens + _OTHER_BYTES,
                seconds=self._timeout_seconds,
                timeout_seconds=self._timeout_seconds,
            )
        except httpx.HTTPError:
            answer = None
        except (ValueError, RecursionError):
            return None  # half a character, or nested too deep to be told on
        finally:
            self._calls -= 1
        if answer is not None and (answer.status in _REFUSALS or not answer.is_whole):
            return None
        ids = _ids(answer.body) if answer is not None and answer.is_ok else None
        if ids is None:
            self._silent_until[model] = self._clock() + RETRY_SECONDS
        return ids or None


def _ids(body: bytes) -> array[int] | None:
    """What an answer says; None where it does not."""
    try:
        return array("I", msgspec.json.decode(body, type=_Tokens).tokens)
    except (msgspec.DecodeError, RecursionError, OverflowError):
        return None


def _question(request: InferenceRequest, *, model: str) -> dict[str, object] | None:
    """The body of the call; None for requests without one prompt."""
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
    return asked
