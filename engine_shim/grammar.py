"""Structured output through llguidance: grammars compiled off the event loop, kept, and followed token by token.

A grammar is compiled once and copied for each request. The copy tells which tokens may come next; the sampler rules out
all others, so what is said fits by construction. At its end a grammar lets only an end-of-sequence token pass.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from engine_shim.types import Constraint, ConstraintError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

#: Compiled grammars that are kept, the latest used.
KEPT_GRAMMARS = 256
#: JSON may be set in lines and indented, but no model can go on with blanks for ever.
_WHITESPACE = r"[ \t\n\r]{0,32}"
#: Why the library stops at a grammar that it can read but not follow.
_LIMITS = dict.fromkeys(("LexerTooComplex", "ParserTooComplex"), "it is too large to follow")


class GrammarKind(StrEnum):
    """How a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    GRAMMAR = "grammar"  # Lark's or llama.cpp's notation; which, is told by the text
    CHOICE = "choice"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What a request asks its answer to be; ``text`` of a schema and of a choice is JSON."""

    kind: GrammarKind
    text: str


class GrammarError(ValueError):
    """No grammar, or one that the library does not know; the message says where and why."""


class GrammarCompiler:
    """Compiles grammars for one model. ``compile`` is for the event loop's thread."""

    def __init__(self, tokenizer: Tokenizer, *, vocab_tokens: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_tokens = vocab_tokens
        self._eos_token_ids = tuple(eos_token_ids)
        self._compiled: OrderedDict[Grammar, asyncio.Task[LLMatcher]] = OrderedDict()
        self._vocabulary: LLTokenizer | None = None
        self._lock = threading.Lock()

    async def compile(self, grammar: Grammar) -> Constraint:
        """A fresh constraint. Requests for one grammar share one compilation. Raises ``GrammarError``."""
        task = self._compiled.get(grammar)
        if task is None:
            task = self._compiled[grammar] = asyncio.create_task(asyncio.to_thread(self._matcher, grammar))
            while len(self._compiled) > KEPT_GRAMMARS:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(grammar)
        try:
            # A client that leaves must not take the compilation from the others.
            matcher = await asyncio.shield(task)
        except GrammarError:
            self._compiled.pop(grammar, None)
            raise
        return _Follower(matcher.deep_copy(), ends=frozenset(self._eos_token_ids))

    def _matcher(self, grammar: Grammar) -> LLMatcher:
        from llguidance import LLMatcher

        matcher = LLMatcher(self._read_vocabulary(), _definition(grammar), log_level=0)
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise GrammarError(_LIMITS.get(first.stop_reason(), "no answer can fit it"))
        return matcher

    def _read_vocabulary(self) -> LLTokenizer:
        from llguidance import LLTokenizer

        with self._lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = LLTokenizer(
                        self._tokenizer.to_str(), n_vocab=self._vocab_tokens, eos_token=list(self._eos_token_ids)
                    )
                except ValueError as error:
                    raise GrammarError(f"this model's tokenizer cannot be constrained: {error}") from error
            return self._vocabulary


class _Follower:
    """A matcher that is led along one request's output; implements ``Constraint``."""

    def __init__(self, matcher: LLMatcher, *, ends: frozenset[int]) -> None:
        self._matcher = matcher
        self._ends = ends
        self._followed = 0

    def fitting(self, output: Sequence[int], drafts: Sequence[int]) -> int:
        """See ``Constraint``; what ends the answer is not tried as a draft."""
        self._follow(output)
        last = next((place for place, token in enumerate(drafts) if token in self._ends), len(drafts))
        return self._matcher.validate_tokens(list(drafts[:last]))

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[bytes]:
        """See ``Constraint``."""
        self._follow(output)
        masks = [self._matcher.compute_bitmask()]
        for draft in drafts:
            self._matcher.consume_token(draft)
            masks.append(self._matcher.compute_bitmask())
        self._matcher.rollback(len(drafts))
        if self._matcher.is_error():
            raise ConstraintError(self._matcher.get_error())
        return masks

    def _follow(self, output: Sequence[int]) -> None:
        self._matcher.consume_tokens(list(output[self._followed :]))
        self._followed = len(output)


def _definition(grammar: Grammar) -> str:
    """The grammar as llguidance reads it."""
    from llguidance import LLMatcher, grammar_from

    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA:
                return LLMatcher.grammar_from_json_schema(
                    grammar.text, defaults={"whitespace_flexible": True, "whitespace_pattern": _WHITESPACE}
                )
            case GrammarKind.REGEX:
                return LLMatcher.grammar_from_regex(grammar.text)
            case GrammarKind.GRAMMAR:
                return grammar_from("grammar", grammar.text)
            case GrammarKind.CHOICE:
                return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(grammar.text))))
    except ValueError as error:
        raise GrammarError(str(error)) from error
