"""Requests as SGLang's scheduler counts them: what one wants, those not heard of yet, those that generate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.core.forecast import Allocation

#: The share of its bound that the engine expects an answer to take (``SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR`` of 0.7).
_EXPECTED_RATIO = 0.1
#: So many tokens more than have come have their pages when room is made for the last time before a prompt that comes
#: now is looked up (``Scheduler.event_loop_overlap``).
_AHEAD_TOKENS = 1
#: No answer is reserved more for (``SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION``).
_MOST_RESERVED_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class Want:
    """What a request takes, in tokens: its prompt, its answer's bound (0: unknown), and what that is expected to be.

    ``is_whole``: the answer goes on to its bound (``ignore_eos``).
    """

    prompt_tokens: int
    most_tokens: int = 0
    answer_tokens: int = 0
    is_whole: bool = False

    @property
    def reserved_tokens(self) -> int:
        """What is kept free for its answer when it is let in."""
        return min(self.most_tokens, _MOST_RESERVED_TOKENS)


@dataclass(slots=True, eq=False)
class Unheard:
    """A request of which events are due. ``keys`` are its prompt's whole pages, of ``blocks`` that it takes; none where
    its answer alone is unheard of. ``sent_at`` and ``ended_at`` order what happened; ``heard`` is how much had been
    heard when it was sent. ``is_alone``: the rank had nothing to do then. ``generated`` are its answer's tokens.
    """

    allocation: Allocation
    keys: Sequence[int]
    blocks: int
    want: Want
    sent_at: int
    heard: int
    is_alone: bool
    ended_at: int | None = None
    generated: int = 0

    def own_pages(self, page_tokens: int, *, prompt_pages: int) -> int:
        """Once it has ended: its pages behind those of its prompt as room was made for the last token, behind which
        nothing is computed. Of an answer that nobody counted the last page is thought to be nearly full.
        """
        tokens = self.want.prompt_tokens % page_tokens + self.generated - 2
        if not self.generated:
            tokens = (len(self.allocation.keys) - prompt_pages + 1) * page_tokens - 2
        return max(0, -(-tokens // page_tokens))


@dataclass(slots=True)
class Row:
    """A request that generates: what it wants and how many tokens there are of its answer."""

    want: Want
    generated: int

    def own_pages(self, page_tokens: int, *, ahead_tokens: int = _AHEAD_TOKENS) -> int:
        """Its pages behind those of its prompt that are whole. For the last token of an answer none is taken."""
        tokens = self.generated + ahead_tokens
        if ahead_tokens and self.want.is_whole and self.want.most_tokens:
            tokens = min(tokens, self.want.most_tokens - 1)
        return max(1, -(-(self.want.prompt_tokens % page_tokens + tokens) // page_tokens))

    @property
    def is_growing(self) -> bool:
        """Whether more is to come behind what is computed before the next prompt is looked up."""
        bound = self.want.most_tokens if self.want.is_whole else 0
        return not bound or self.generated + _AHEAD_TOKENS + 1 < bound

    @property
    def left_tokens(self) -> int:
        """What is still to come, by what is expected of it."""
        whole = self.want.most_tokens if self.want.is_whole else self.want.answer_tokens
        return max(1, whole - self.generated)

    @property
    def reserved_tokens(self) -> float:
        """What the engine keeps free for it."""
        ratio = 1.0 if self.want.is_whole else _EXPECTED_RATIO
        return max(0, self.want.reserved_tokens - self.generated) * ratio
