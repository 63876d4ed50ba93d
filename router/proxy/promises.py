"""What requests will leave in a rank's cache, before any event says so.

Events come up to a second late. A prompt's blocks are promised when the engine will find them (at dispatch, or at the
first byte), an answer's when its tokens are known; promises outlive their request for as long as events may lag.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from router.core.chunked_prefill import found_behind
from router.core.index import PrefixIndex
from router.core.namespaces import PLAIN
from router.core.provisional import Ticket
from router.core.radix_pool import RadixPool
from router.core.shared_allocation import AnyAllocation
from router.core.shared_pool import SharedPool
from router.core.types import Engine, SessionKey
from router.fleet.fleet import Fleet
from router.fleet.member import Member
from router.proxy.prepared import PreparedRequest
from router.wire.block_keys import block_keys

#: After a request has ended its blocks still count for so long: the engine's events may be that late.
PROVISIONAL_SECONDS = 2.0

#: What one request has entered as provisional, and where.
Promise = tuple[PrefixIndex, Ticket]


#: So many tokens of a text tell whether it is the answer.
_WORDS_TOKENS = 16


class Tokenizers(Protocol):
    """What is known of models' tokens."""

    def special_ids(self, model: str) -> frozenset[int]:
        """Ids of the special tokens that a chat template may set between messages."""

    def text_of(self, model: str, ids: Sequence[int]) -> str:
        """The text that tokens stand for; empty where that is not known."""


class _Answered:
    """A request that has just ended, of whose answer the length is known, and perhaps how its text begins."""

    __slots__ = ("first_words", "member", "output_tokens", "prepared")

    def __init__(
        self,
        member: Member,
        prepared: PreparedRequest,
        output_tokens: int,
        first_words: Callable[[], str] | None,
    ) -> None:
        self.member = member
        self.prepared = prepared
        self.output_tokens = output_tokens
        self.first_words = first_words


class Promises:
    """Makes promises in the indexes, and takes each back in time."""

    def __init__(self, fleet: Fleet, *, tokenizers: Tokenizers) -> None:
        self._fleet = fleet
        self._tokenizers = tokenizers
        self._expiring: deque[tuple[float, Callable[[], object]]] = deque()
        self._answered: dict[tuple[str, SessionKey], _Answered] = {}

    def sent(self, member: Member, prepared: PreparedRequest) -> AnyAllocation | None:
        """A prompt leaves for this rank and takes room there."""
        index = member.index
        if index is None or prepared.tokens is None or not self._fleet.knows(member):
            return None
        self._note_namespace(member, index, prepared)
        if (pool := index.pool(member.slot)) is None:
            return None
        stride = index.stride(member.slot)
        whole, begun_tokens = divmod(prepared.prompt_tokens, stride * index.block_tokens)
        blocks = whole + 1  # with room for the first token
        ends = prepared.keys(index.block_tokens)[stride - 1 :: stride]
        if isinstance(pool, RadixPool):
            return pool.guard.attempt(pool.sent, ends, blocks=blocks, want=prepared.want)
        if isinstance(pool, SharedPool):
            return pool.guard.attempt(pool.sent, ends, blocks=blocks, begun_tokens=begun_tokens)
        return pool.guard.attempt(pool.sent, ends, blocks=blocks)

    @staticmethod
    def _note_namespace(member: Member, index: PrefixIndex, prepared: PreparedRequest) -> None:
        """SGLang's events will not say under which extra key a prompt was."""
        if member.target.engine is not Engine.SGLANG or prepared.tokens is None:
            return
        keys = prepared.keys(index.block_tokens)
        if prepared.plain_seed is not None:
            plain = block_keys(prepared.tokens, block_tokens=index.block_tokens, parent=prepared.plain_seed)
            index.namespaces.learn(plain, keys, seed=prepared.seed)
        elif index.namespaces:
            index.namespaces.learn(keys, keys, seed=PLAIN)
        if index.namespaces.is_crowded:
            index.sweep_soon()

    def prompt(self, member: Member, prepared: PreparedRequest) -> Promise | None:
        """The prompt's blocks will be on this rank."""
        index = member.index
        if index is None or prepared.tokens is None or not self._fleet.knows(member):
            return None
        return index, index.promise(
            member.slot, prepared.keys(index.block_tokens), prompt_tokens=prepared.prompt_tokens
        )

    def pieces(self, member: Member, prepared: PreparedRequest, *, cached_tokens: int) -> Promise | None:
        """The prompt's blocks that prompts behind it find before it is computed whole: of a long one all but the end.

        ``cached_tokens`` of it are there. Its own tokens wait already.
        """
        index, chunk_tokens = member.index, member.prefill_chunk_tokens
        if index is None or not chunk_tokens or prepared.tokens is None or not self._fleet.knows(member):
            return None
        found = found_behind(
            prepared.prompt_tokens,
            cached_tokens=cached_tokens,
            waiting_tokens=max(0, member.load.waiting_tokens - (prepared.prompt_tokens - cached_tokens)),
            chunk_tokens=chunk_tokens,
            page_tokens=index.block_tokens,
        )
        blocks = found // index.block_tokens
        if not blocks:
            return None
        keys = prepared.keys(index.block_tokens)[:blocks]
        return index, index.promise(member.slot, keys, prompt_tokens=found + 1)

    def output(self, member: Member, prepared: PreparedRequest, computed: Sequence[int]) -> Promise | None:
        """The answer's blocks too: those of its tokens whose keys and values are there (``computed_of``)."""
        index = member.index
        if index is None or prepared.tokens is None or not computed or not self._fleet.knows(member):
            return None
        keys = (*prepared.keys(index.block_tokens), *prepared.keys_after(computed, block_tokens=index.block_tokens))
        start = prepared.prompt_tokens // index.block_tokens
        return index, index.promise_more(member.slot, keys, start=start)

    def generated(
        self,
        member: Member,
        prepared: PreparedRequest,
        ids: Sequence[int],
        *,
        known: Sequence[int],
        behind: Promise | None,
    ) -> tuple[Promise, Sequence[int]] | None:
        """The blocks that an answer has filled since all that are ``known``, which are those of its prompt and of it
        what ``behind`` promised last; and all now. None while it fills no other, or its rank keeps no answer before it
        has ended.
        """
        index = member.index
        if (
            index is None
            or prepared.tokens is None
            or member.target.engine is not Engine.VLLM
            or not self._fleet.knows(member)
        ):
            return None
        unit, start = index.block_tokens, len(known)
        first = start * unit - prepared.prompt_tokens
        filled = (prepared.prompt_tokens + len(ids) - 1) // unit  # behind the last token nothing was made
        if filled <= start:
            return None
        new = array("I", ids[max(0, first) : filled * unit - prepared.prompt_tokens])
        rest = prepared.tokens[start * unit :] + new
        seed = known[-1] if known else prepared.seed
        keys = (*known, *block_keys(rest, block_tokens=unit, parent=seed))
        last = behind[1] if behind is not None and behind[0] is index else None
        return (index, index.promise_more(member.slot, keys, start=start, behind=last)), keys

    @staticmethod
    def reused(member: Member, prepared: PreparedRequest, *, tokens: int) -> None:
        """The engine has found so much of a prompt, which is news where the picture of the rank has gaps."""
        index = member.index
        if index is not None and prepared.tokens is not None and index.has_gaps(member.slot):
            index.reused(member.slot, prepared.keys(index.block_tokens), tokens=tokens)

    def answered(
        self,
        member: Member,
        prepared: PreparedRequest,
        *,
        output_tokens: int,
        first_words: Callable[[], str] | None,
        now: float,
    ) -> None:
        """An answer of so many tokens has ended whose ids are not known: the session's next prompt may tell them."""
        if prepared.session is not None and prepared.tokens is not None:
            key = (prepared.model, prepared.session)
            answered = self._answered[key] = _Answered(member, prepared, output_tokens, first_words)
            self._expiring.append((now + PROVISIONAL_SECONDS, partial(self._forget, key, answered)))

    def _forget(self, key: tuple[str, SessionKey], answered: _Answered) -> None:
        """Nobody has brought it back in time, unless the session was answered once more since."""
        if self._answered.get(key) is answered:
            del self._answered[key]

    def recall(self, prepared: PreparedRequest, *, now: float) -> None:
        """What the session's last answer left behind, if this prompt brings it back whole.

        The prompt has the answer's text: where the template's next special token stands just behind as many tokens as
        the answer had, and they begin with its first words, they are the answer's.
        """
        answered = self._answered.pop((prepared.model, prepared.session), None) if prepared.session else None
        if answered is None or prepared.tokens is None:
            return
        before, count = answered.prepared, answered.output_tokens
        start = before.prompt_tokens
        if before.seed != prepared.seed or before.tokens != prepared.tokens[:start]:
            return
        rest = prepared.tokens[start : start + count + 1]
        special = self._tokenizers.special_ids(prepared.model)
        length = next((place for place, token in enumerate(rest) if token in special), None)
        if length not in (count - 1, count) or not self._begins_as(answered, rest[:length]):
            return
        if promise := self.output(answered.member, before, computed_of(rest[:count], is_cut=False)):
            self.keep([promise], now=now)

    def _begins_as(self, answered: _Answered, ids: Sequence[int]) -> bool:
        """Whether a text may be the answer's: it begins like it, as far as both are known."""
        said = answered.first_words().lstrip() if answered.first_words is not None else ""
        if not said:
            return True
        # The last of so few tokens may end inside a character.
        text = self._tokenizers.text_of(answered.prepared.model, ids[:_WORDS_TOKENS]).lstrip().rstrip("\ufffd")
        known = min(len(said), len(text))
        return said[:known] == text[:known]

    def keep(self, promises: Iterable[Promise], *, now: float) -> None:
        """The request is over and its blocks are there: count them until events must have come."""
        for index, ticket in promises:
            index.provisional.end(ticket)
            self._expiring.append((now + PROVISIONAL_SECONDS, partial(index.provisional.drop, ticket)))

    @staticmethod
    def begun(allocation: AnyAllocation | None) -> None:
        """The first token has come."""
        if allocation is not None:
            allocation.begun()

    @staticmethod
    def grows(allocation: AnyAllocation | None, generated: Callable[[], int]) -> None:
        """Its answer has so many tokens by now, which takes room, of which events tell late or not at all."""
        if allocation is not None:
            allocation.grows(generated)

    def leave(
        self,
        allocation: AnyAllocation | None,
        member: Member,
        prepared: PreparedRequest,
        computed: Sequence[int],
        *,
        now: float,
    ) -> None:
        """The request is over; its blocks stay, the answer's too where its tokens are known."""
        if allocation is None:
            return
        index = member.index
        keys: Sequence[int] = allocation.keys
        if index is not None and computed and self._fleet.knows(member):
            stride, unit = index.stride(member.slot), index.block_tokens
            keys = (*prepared.keys(unit), *prepared.keys_after(computed, block_tokens=unit))[stride - 1 :: stride]
        allocation.ended(keys)
        self._expiring.append((now + PROVISIONAL_SECONDS, allocation.forget))

    @staticmethod
    def take_back(promises: Iterable[Promise], allocation: AnyAllocation | None) -> None:
        """The request failed: nothing of it is there."""
        for index, ticket in promises:
            index.provisional.drop(ticket)
        if allocation is not None:
            allocation.forget()

    def expire(self, now: float) -> None:
        """Let go of what is past its time. Called before each lookup."""
        while self._expiring and self._expiring[0][0] <= now:
            self._expiring.popleft()[1]()


def counts_at_dispatch(member: Member) -> bool:
    """Whether a second request finds the blocks of one that has not been prefilled yet.

    vLLM and the shim enter blocks as they schedule them; SGLang once they are computed: what is in flight together all
    misses, but for prompts computed in pieces (``Promises.pieces``).
    """
    return member.target.engine is not Engine.SGLANG


def computed_of(output: Sequence[int], *, is_cut: bool) -> Sequence[int]:
    """Of an answer's tokens those whose keys and values the rank has: all but the last, behind which nothing was made.

    An answer that is cut off was being gone on with: of the last token that came the next one was in the making.
    """
    return output if is_cut else output[:-1]
