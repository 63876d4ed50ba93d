"""A request keyed once: its session, its tokens, and the names of its blocks."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from functools import lru_cache

from router.core.radix_requests import Want
from router.core.types import Handover, SessionKey
from router.fleet.decisions import Decided
from router.proxy.token_cache import Chain
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.openai import Endpoint, InferenceRequest
from router.wire.text_keys import chat_text, prompt_text, text_keys

#: Without a tokenizer a token is taken for so many bytes of text.
BYTES_A_TOKEN = 4


class PreparedRequest:
    """A request keyed once, for any number of attempts. ``tokens`` is None where only text is known.

    ``plain_seed`` is the root that SGLang's events imply, which do not carry the request's extra key; None without one.
    """

    __slots__ = (
        "_keys",
        "allowed",
        "decided",
        "handovers",
        "ideal_tokens",
        "is_streamed",
        "is_whole",
        "model",
        "most_tokens",
        "output_tokens",
        "plain_seed",
        "prompt_tokens",
        "seed",
        "session",
        "text_keys",
        "tokenize_seconds",
        "tokens",
        "told_model",
    )

    def __init__(
        self,
        model: str,
        *,
        session: SessionKey | None,
        tokens: array[int] | None,
        prompt_tokens: int,
        output_tokens: int,
        seed: int,
        plain_seed: int | None = None,
        handovers: frozenset[Handover] = frozenset(),
        most_tokens: int | None = None,
        is_whole: bool = False,
        is_streamed: bool = True,
        told_model: str = "",
    ) -> None:
        self.model = model
        #: What workers call it, and an adapter over it if it is that which the client asks for.
        self.told_model = told_model or model
        self.session = session
        self.tokens = tokens
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        #: The bound of its answer, None where the client sets none; whether it goes on to that (``ignore_eos``).
        self.most_tokens = most_tokens
        self.is_whole = is_whole
        #: Its answer begins with its first token; else it comes when all is generated.
        self.is_streamed = is_streamed
        self.seed = seed
        self.plain_seed = plain_seed
        #: By which contracts the prompt and its answer may be computed on different ranks.
        self.handovers = handovers
        #: None where no text is known; empty where it is shorter than a block.
        self.text_keys: Sequence[int] | None = None
        self.tokenize_seconds = 0.0
        self.ideal_tokens = 0
        self.decided: Decided | None = None
        #: Where admission lets it go; None: anywhere.
        self.allowed: frozenset[int] | None = None
        self._keys: dict[int, Sequence[int]] = {}

    @property
    def want(self) -> Want:
        """What it takes of a rank."""
        return Want(self.prompt_tokens, self.most_tokens or 0, self.output_tokens, self.is_whole)

    @property
    def is_splittable(self) -> bool:
        """Prompt and answer may be computed on different ranks."""
        return bool(self.handovers)

    def know_keys(self, keys: Mapping[Chain, Sequence[int]]) -> None:
        """Keys that came with the tokens. Others are hashed when they are asked for."""
        self._keys.update((chain.block_tokens, known) for chain, known in keys.items() if chain.seed == self.seed)

    def keys(self, block_tokens: int) -> Sequence[int]:
        """Chain keys of the prompt in blocks of this size; empty without tokens."""
        if self.tokens is None:
            return ()
        if block_tokens not in self._keys:
            self._keys[block_tokens] = block_keys(self.tokens, block_tokens=block_tokens, parent=self.seed)
        return self._keys[block_tokens]

    def keys_after(self, output: Sequence[int], *, block_tokens: int) -> Sequence[int]:
        """Keys of the whole blocks that ``output`` fills after the prompt's own."""
        if self.tokens is None:
            return ()
        known = self.keys(block_tokens)
        rest = self.tokens[len(known) * block_tokens :] + array("I", output)
        return block_keys(rest, block_tokens=block_tokens, parent=known[-1] if known else self.seed)


def guessed_tokens(request: InferenceRequest) -> int:
    """Prompt tokens as far as the body's size tells; tokenizing computes nothing."""
    if request.endpoint in (Endpoint.TOKENIZE, Endpoint.COUNT_TOKENS):
        return 1
    return max(1, len(request.body) // BYTES_A_TOKEN)


def request_text_keys(request: InferenceRequest, *, model: str, seed: int) -> Sequence[int] | None:
    """Keys over the prompt's text; None where a prompt leaves nothing in a cache, or nests too deep for a text."""
    try:
        if request.chat is not None:
            text = chat_text(request.chat["messages"], tools=request.chat.get("tools"))
        elif request.prompt is not None:
            text = prompt_text(request.prompt)
        else:
            return None
    except RecursionError:
        return None
    return text_keys(text, parent=_text_seed(model, seed))


@lru_cache(maxsize=1024)
def _text_seed(model: str, seed: int) -> int:
    return namespace_seed(model, str(seed))
