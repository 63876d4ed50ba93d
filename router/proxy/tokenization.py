"""Requests to the token ids and block keys their engine will see: chat template, tokenizer, and a memory of heads.

An agent's turn sends its whole history again. The prompt is rendered, and the longest head of it that came before
is looked up with its ids and keys: a turn tokenizes and hashes what it added.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import jinja2
from tokenizers import Tokenizer

from router.errors import ConfigError
from router.proxy.cuts import Cutter
from router.proxy.encoder import Encode, encoder_of
from router.proxy.token_cache import Chain, Known, TokenCache
from router.wire import anthropic
from router.wire.block_keys import block_keys
from router.wire.chat_template import ChatTemplate, TemplateRefusal
from router.wire.openai import Endpoint, InferenceRequest

#: Memory for the heads of chats, per model, and again for those of plain prompts.
MAX_REMEMBERED_BYTES = 256 * 1024 * 1024
#: What is tokenized at once, if it can be cut: a few hundredths of a second.
SLICE_CHARS: Final = 64 * 1024
#: A text of more characters a token than this is hardly one that fits: tables of blanks have as many.
USUAL_CHARS: Final = 8
#: The longest prompt that is followed where a rank does not say what it takes.
MOST_PROMPT_TOKENS: Final = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, and its keys for the chains that were asked for."""

    tokens: array[int]
    keys: Mapping[Chain, Sequence[int]]


class TooLong(Exception):
    """The prompt has more tokens than any rank takes."""


class Draft:
    """A prompt whose head is known and whose rest is tokenized slice by slice: one thread at a time, but any.

    The tokenizer lets go of the interpreter. A text that would need tokens of unusual length to fit is counted in
    fragments first, wherever those are cut: what no rank takes costs what the longest prompt does, whatever its size,
    and if it has no place at which it could be cut for good.
    """

    __slots__ = (
        "_at",
        "_cache",
        "_closing",
        "_counted",
        "_known",
        "_most_tokens",
        "_pieces",
        "_rest",
        "_text",
        "_tokenizer",
    )

    def __init__(
        self, tokenizer: PromptTokenizer, cache: TokenCache, text: str, *, closing: Sequence[int], most_tokens: int
    ) -> None:
        """Look the head up. Raises ``TooLong``."""
        self._tokenizer = tokenizer
        self._cache = cache
        self._text = text
        self._closing = closing
        self._most_tokens = most_tokens
        self._known: Known | None = None
        self._pieces: list[tuple[str, array[int]]] = []
        self._rest: Iterator[str] = iter(())
        #: How far it has been tokenized, or counted while nothing is known; and how many tokens that is.
        self._at = self._counted = 0
        if len(text) <= USUAL_CHARS * most_tokens:
            self._look_up()

    @property
    def unknown_chars(self) -> int:
        """What is left for ``finish`` to tokenize, and before that to count."""
        left = len(self._text) - self._at
        return left if self._known is not None else left + len(self._text)

    def advance(self) -> None:
        """Tokenize a slice of the rest. Raises ``TooLong``."""
        if self._known is None:
            end = self._at + SLICE_CHARS
            self._count(self._tokenizer.ids(self._text[self._at : end]))
            self._at = min(end, len(self._text))
            if self._at == len(self._text):
                self._look_up()
            return
        end = self._at + SLICE_CHARS
        for piece in self._rest:
            ids = self._tokenizer.ids(piece)
            self._pieces.append((piece, ids))
            self._at += len(piece)
            self._count(ids)
            if self._at >= end:
                break

    def finish(self, chains: Iterable[Chain] = ()) -> Prompt:
        """Tokenize what is left, and key it; once. Raises ``TooLong``."""
        while self.unknown_chars:
            self.advance()
        assert self._known is not None
        tail = self._pieces.pop()[1] if self._pieces else array("I")
        tail.extend(self._closing)
        return Prompt(*self._cache.keep(self._text, self._known, self._pieces, tail=tail, chains=chains))

    def _look_up(self) -> None:
        self._known = self._cache.look_up(self._text)
        self._at, self._counted = self._known.chars, len(self._closing)
        self._count(self._known.tokens)
        self._rest = iter(self._tokenizer.pieces(self._text, self._at))

    def _count(self, ids: Sequence[int]) -> None:
        self._counted += len(ids)
        if self._counted > self._most_tokens:
            raise TooLong


@dataclass(frozen=True, slots=True)
class Given:
    """A prompt that came as token ids."""

    tokens: array[int]

    @property
    def unknown_chars(self) -> int:
        """Hashing an id takes a hundredth of the time that tokenizing a character does."""
        return len(self.tokens) // 100

    def finish(self, chains: Iterable[Chain] = ()) -> Prompt:
        """Hash it whole: there is no text by which its head could be known."""
        keys = {chain: block_keys(self.tokens, block_tokens=chain.block_tokens, parent=chain.seed) for chain in chains}
        return Prompt(self.tokens, keys)


class PromptTokenizer:
    """One model's tokenizer and template. Any thread may use it."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, *, encode: Encode | None = None) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._encode = encode or encoder_of(tokenizer)
        self._cutter = Cutter.of(tokenizer)
        self._chats = TokenCache(self._cutter, max_bytes=MAX_REMEMBERED_BYTES)
        opening, self._closing = _added_around(tokenizer)
        self._texts = TokenCache(self._cutter, max_bytes=MAX_REMEMBERED_BYTES, opening=opening)

    @property
    def has_template(self) -> bool:
        """Whether chats can be tokenized, not only plain prompts."""
        return self._template is not None

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text: a template's marks, the end of an answer."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    def decode(self, ids: Sequence[int]) -> str:
        """The text that tokens stand for, but for special ones."""
        return self._tokenizer.decode(list(ids))

    @classmethod
    def from_files(cls, tokenizer_json: bytes, config: Mapping[str, Any]) -> PromptTokenizer:
        """Build from a ``tokenizer.json`` and the ``tokenizer_config.json`` that stands beside it."""
        try:
            tokenizer = Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:
            raise ConfigError(f"tokenizer.json cannot be read: {error}") from error
        tokenizer.no_truncation()
        tokenizer.no_padding()
        source = config.get("chat_template")
        if isinstance(source, list):  # several named templates
            source = next((entry["template"] for entry in source if entry.get("name") == "default"), None)
        variables = {
            name: token if isinstance(token, str) else str(token.get("content", ""))
            for name in ("bos_token", "eos_token", "pad_token", "unk_token")
            if isinstance(token := config.get(name), str | Mapping)
        }
        try:
            template = ChatTemplate(source, variables=variables) if source else None
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template does not parse: {error}") from error
        return cls(tokenizer, template)

    def start(self, request: InferenceRequest, *, most_tokens: int = MOST_PROMPT_TOKENS) -> Draft | Given | None:
        """Render the prompt and look its head up. Time in the size of the text, but next to none.

        None where there is no single prompt, no chat template, more than text in the messages, or what the template
        refuses: the worker may have another, and judges. Raises ``TooLong`` where there are sure to be more tokens than
        ``most_tokens``; a message has one at least.
        """
        if request.chat is not None:
            if len(request.chat["messages"]) > most_tokens:
                raise TooLong
            text = self._render(request)
            return None if text is None else Draft(self, self._chats, text, closing=(), most_tokens=most_tokens)
        prompt = request.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return Draft(self, self._texts, prompt, closing=self._closing, most_tokens=most_tokens)
        if isinstance(prompt, list) and prompt and type(prompt[0]) is int:
            if len(prompt) > most_tokens:
                raise TooLong
            if set(map(type, prompt)) != {int}:
                return None
            try:
                return Given(array("I", prompt))
            except OverflowError:  # not an id
                return None
        return None

    def encode(self, request: InferenceRequest) -> array[int] | None:
        """Token ids of the request's prompt; None as ``start``."""
        draft = self.start(request)
        return None if draft is None else draft.finish().tokens

    def ids(self, piece: str) -> array[int]:
        """Token ids of a text, nothing added."""
        return self._encode(piece)

    def pieces(self, text: str, start: int) -> Iterator[str]:
        """``text`` from the cut ``start`` on, in pieces that tokenize as in the whole."""
        return self._cutter.pieces(text, start)

    def _render(self, request: InferenceRequest) -> str | None:
        if self._template is None or request.chat is None:
            return None
        with contextlib.suppress(TemplateRefusal):
            return _rendered(self._template, request.chat)
        # Anthropic's system messages may stand anywhere: for templates that want one first vLLM merges them.
        if request.endpoint is Endpoint.MESSAGES:
            merged = {**request.chat, "messages": anthropic.system_first(request.chat["messages"])}
            with contextlib.suppress(TemplateRefusal):
                return _rendered(self._template, merged)
        return None


def _rendered(template: ChatTemplate, chat: Mapping[str, Any]) -> str:
    extra = chat.get("chat_template_kwargs")
    return template.render(
        chat["messages"],
        tools=chat.get("tools"),
        add_generation_prompt=chat.get("add_generation_prompt", True),
        extra=extra if isinstance(extra, Mapping) else None,
        documents=chat.get("documents"),
    )


def _added_around(tokenizer: Tokenizer) -> tuple[Sequence[int], Sequence[int]]:
    """Ids that the tokenizer itself puts before and after a plain prompt."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    whole = tokenizer.encode("a", add_special_tokens=True).ids
    start = next(at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return whole[:start], whole[start + len(plain) :]
