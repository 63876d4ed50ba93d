"""Requests to the token ids and block keys their engine will see: chat template, tokenizer, and a memory of heads.

An agent's turn sends its whole history again. The prompt is rendered, and the longest head of it that came before
is looked up with its ids and keys: a turn tokenizes and hashes what it added.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jinja2
from tokenizers import Tokenizer

from router.errors import BadRequest, ConfigError
from router.proxy.cuts import Cutter
from router.proxy.encoder import Encode, encoder_of
from router.proxy.token_cache import Chain, Known, TokenCache
from router.wire import anthropic
from router.wire.block_keys import block_keys
from router.wire.chat_template import ChatTemplate, MediaContent, TemplateRefusal
from router.wire.openai import Endpoint, InferenceRequest

#: Memory for the heads of chats, per model, and again for those of plain prompts.
MAX_REMEMBERED_BYTES = 256 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt's token ids, and its keys for the chains that were asked for."""

    tokens: array[int]
    keys: Mapping[Chain, Sequence[int]]


@dataclass(frozen=True, slots=True)
class Draft:
    """A prompt whose head is known and whose rest is not tokenized yet."""

    tokenizer: PromptTokenizer
    cache: TokenCache
    text: str
    known: Known
    closing: Sequence[int]

    @property
    def unknown_chars(self) -> int:
        """What ``finish`` will tokenize."""
        return len(self.text) - self.known.chars

    def finish(self, chains: Iterable[Chain] = ()) -> Prompt:
        """Tokenize the rest; once. On any thread: the tokenizer lets go of the interpreter."""
        pieces = [(piece, self.tokenizer.ids(piece)) for piece in self.tokenizer.pieces(self.text, self.known.chars)]
        tail = pieces.pop()[1] if pieces else array("I")
        tail.extend(self.closing)
        return Prompt(*self.cache.keep(self.text, self.known, pieces, tail=tail, chains=chains))


@dataclass(frozen=True, slots=True)
class Given:
    """A prompt that came as token ids."""

    tokens: array[int]
    unknown_chars: int = 0

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

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that stand for no text: a template's marks, the end of an answer."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

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

    def start(self, request: InferenceRequest) -> Draft | Given | None:
        """Render the prompt and look its head up. Time in the size of the text, but next to none.

        None where there is no single prompt, no chat template, or more than text in the messages. Raises
        ``BadRequest`` for what the template refuses.
        """
        if request.chat is not None:
            text = self._render(request)
            return None if text is None else Draft(self, self._chats, text, self._chats.look_up(text), ())
        prompt = request.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            return Draft(self, self._texts, prompt, self._texts.look_up(prompt), self._closing)
        if isinstance(prompt, list) and prompt and set(map(type, prompt)) == {int}:
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

    def pieces(self, text: str, start: int) -> Iterable[str]:
        """``text`` from the cut ``start`` on, in pieces that tokenize as in the whole."""
        return self._cutter.pieces(text, start)

    def _render(self, request: InferenceRequest) -> str | None:
        if self._template is None or request.chat is None:
            return None
        try:
            return _rendered(self._template, request.chat)
        except MediaContent:
            return None
        except TemplateRefusal as error:
            if request.endpoint is Endpoint.CHAT:
                raise BadRequest(
                    f"the model's chat template refuses these messages: {error}", param="messages"
                ) from error
        # The router's own translation was refused; whether the engine's is, the engine will say. System messages may
        # stand anywhere in Anthropic's: for templates that want one first vLLM merges them.
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
