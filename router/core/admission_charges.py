"""What each conversation occupies on each rank, as admission counts it: charges, and the books of the ranks.

A conversation is charged on every rank where it has requests in flight, each for what it adds, and where it has left a
context that it may come back to: the largest of its last few, since a title or a count of tokens beside a conversation
does not end it. A context that was brought to another rank is no longer charged where it was. A request that failed
leaves nothing, and takes nothing from where the conversation was.

An idle charge is kept for as long as the conversation's ``patience``, then it may lapse when its room is wanted.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from router.core.returns import Conversation

#: Requests after which a context that has not been seen again is taken to be given up.
_REMEMBERED: Final = 4
#: A context brought elsewhere whose size is at least this share of what is charged here has moved.
_MOVED_RATIO: Final = 0.7


@dataclass(slots=True, eq=False)
class Charge:
    """What one conversation occupies on one rank. Written by ``Charges`` alone."""

    conversation: Conversation
    slot: int
    inflight_tokens: int = 0
    idle_since: float = 0.0
    patience_seconds: float = 0.0
    is_lapsable: bool = False
    left: deque[int] = field(default_factory=lambda: deque(maxlen=_REMEMBERED))
    visits: list[Visit] = field(default_factory=list)

    @property
    def inflight(self) -> int:
        """Requests under way here."""
        return len(self.visits)

    @property
    def left_tokens(self) -> int:
        """The context that it may come back to."""
        return max(self.left, default=0)

    @property
    def tokens(self) -> int:
        """What is charged: a request in flight has the context before it in itself."""
        return max(self.left_tokens, self.inflight_tokens)

    def tokens_with(self, more_tokens: int) -> int:
        """What would be charged with another request of so many."""
        return max(self.left_tokens, self.inflight_tokens + more_tokens)

    def count(self) -> None:
        """Each adds what it does not find in those before it: what one finds in another is its own once that ends."""
        self.inflight_tokens = 0
        for visit in self.visits:
            self.inflight_tokens += visit.footprint_tokens - min(visit.found_tokens, self.inflight_tokens)


@dataclass(slots=True, eq=False)
class Book:
    """One rank's charges: those in use or lately so, and those idle for long. The idle are in the order of idleness,
    the lapsable in that in which they became so.
    """

    budget_tokens: float = math.inf
    active_tokens: int = 0
    lapsable_tokens: int = 0
    cold_starts: int = 0
    idle: OrderedDict[Conversation, Charge] = field(default_factory=OrderedDict)
    lapsable: OrderedDict[Conversation, Charge] = field(default_factory=OrderedDict)


@dataclass(slots=True, eq=False)
class Visit:
    """One request under way: its whole footprint, of which its answer is expected to be ``output_tokens``, and how much
    it may find in what its conversation has in flight. ``cold`` takes its rank's only place for cold starts until the
    first token. ``keeps``: the rank will have its context afterwards. ``moves`` are idle contexts elsewhere that it
    brings along, each with the time since when it was idle: they are charged until it has succeeded. ``rank_models``
    are those that its rank serves; the ranks of its own ``model`` hold ``pool_tokens`` together.
    """

    prompt_tokens: int
    model: str
    rank_models: frozenset[str] = frozenset()
    pool_tokens: int = 0
    footprint_tokens: int = 0
    output_tokens: int = 0
    found_tokens: int = 0
    charge: Charge | None = None
    book: Book | None = None
    cold: bool = False
    keeps: bool = True
    has_begun: bool = False
    open: bool = True
    moves: list[tuple[Charge, float]] = field(default_factory=list)

    def first_token(self) -> None:
        """Its prefill is over."""
        self.has_begun = True
        self.leave_start()

    def leave_start(self) -> None:
        """The rank's place for a cold start is free again."""
        if self.cold and self.book is not None:
            self.book.cold_starts -= 1
        self.cold = False


def _nobody(conversation: Conversation, slot: int) -> None:
    """Nobody wants to know."""


class Charges:
    """The charges of all conversations, and the books of all ranks. ``now`` from one monotonic clock."""

    def __init__(self) -> None:
        #: Told a conversation and a slot whenever it is charged otherwise there than before.
        self.on_changed: Callable[[Conversation, int], None] = _nobody
        self._charges: dict[Conversation, dict[int, Charge]] = {}
        self._books: dict[int, Book] = {}
        self._due: list[tuple[float, int, Charge]] = []  # a heap by when they may lapse
        self._idled = 0

    def __len__(self) -> int:
        return sum(map(len, self._charges.values()))

    def of(self, conversation: Conversation) -> Mapping[int, Charge]:
        """Its charges by slot."""
        return self._charges.get(conversation, {})

    def all(self) -> Iterator[Charge]:
        """Every charge."""
        return (charge for charges in self._charges.values() for charge in charges.values())

    def book(self, slot: int) -> Book:
        """A rank's book, made on first use."""
        book = self._books.get(slot)
        if book is None:
            book = self._books[slot] = Book()
        return book

    def open(
        self,
        conversation: Conversation,
        visit: Visit,
        slot: int,
        *,
        patience_seconds: float,
        partner: int | None = None,
    ) -> None:
        """The visit begins on ``slot``. Idle contexts elsewhere that it brings along are charged there until it has
        succeeded, that on its ``partner``, which it visits at the same time, for longer.
        """
        for other in self.of(conversation).values():
            has_moved = visit.footprint_tokens >= _MOVED_RATIO * other.left_tokens
            if other.slot not in (slot, partner) and not other.inflight and has_moved:
                visit.moves.append((other, other.idle_since))
        charges = self._charges.setdefault(conversation, {})
        charge = charges.get(slot)
        if charge is None:
            charge = charges[slot] = Charge(conversation, slot)
        else:
            self._take_out(charge)
        visit.charge, visit.book = charge, self.book(slot)
        charge.visits.append(visit)
        charge.count()
        charge.patience_seconds = patience_seconds
        visit.book.active_tokens += charge.tokens
        visit.book.cold_starts += visit.cold
        self.on_changed(conversation, slot)

    def close(self, visit: Visit, *, left_tokens: int | None, now: float) -> None:
        """The visit is over and has left so much in its rank's cache; None: nothing."""
        charge = visit.charge
        if charge is None:
            return
        before = charge.tokens
        charge.visits.remove(visit)
        charge.count()
        if left_tokens is not None:
            charge.left.append(left_tokens)
            for other, idle_since in visit.moves:
                is_same = self.of(charge.conversation).get(other.slot) is other and other.idle_since == idle_since
                if is_same and not other.inflight:
                    self._strike(other)
        if self.of(charge.conversation).get(charge.slot) is not charge:
            return  # struck meanwhile
        book = self.book(charge.slot)
        book.active_tokens += charge.tokens - before
        if charge.inflight:
            return
        self.on_changed(charge.conversation, charge.slot)
        if not charge.left:
            self._strike(charge)
            return
        charge.idle_since = now
        book.idle[charge.conversation] = charge
        self._idled += 1
        heapq.heappush(self._due, (now + charge.patience_seconds, self._idled, charge))

    def is_at_work(self, conversation: Conversation) -> bool:
        """Some request of it is in flight."""
        return any(charge.inflight for charge in self.of(conversation).values())

    def drop_idle(self, conversation: Conversation) -> None:
        """Another router serves the conversation now, and charges it."""
        for charge in list(self.of(conversation).values()):
            if not charge.inflight:
                self._strike(charge)

    def age(self, now: float) -> None:
        """Charges that have been idle for long become lapsable; on a rank of unknown size they end."""
        while self._due and self._due[0][0] < now:
            due, _, charge = heapq.heappop(self._due)
            book = self.book(charge.slot)
            if due != charge.idle_since + charge.patience_seconds or book.idle.get(charge.conversation) is not charge:
                continue  # it has been at work since, or is gone
            if math.isinf(book.budget_tokens):
                self._strike(charge)
                continue
            del book.idle[charge.conversation]
            book.lapsable[charge.conversation] = charge
            charge.is_lapsable = True
            self.on_changed(charge.conversation, charge.slot)
            book.active_tokens -= charge.tokens
            book.lapsable_tokens += charge.tokens

    def lapse(self, slot: int) -> None:
        """End conversations, the longest lapsable first, until the charges fit, or none is left that may lapse."""
        book = self.book(slot)
        while book.lapsable and book.active_tokens + book.lapsable_tokens > book.budget_tokens:
            self._strike(next(iter(book.lapsable.values())))

    def shed(self, slot: int) -> None:
        """Bring a rank's charges within its budget: the idle go first, then the newest in flight."""
        self.lapse(slot)
        book = self.book(slot)
        if book.active_tokens <= book.budget_tokens:
            return
        here = [charges[slot] for charges in reversed(self._charges.values()) if slot in charges]
        for charge in [*book.idle.values(), *(charge for charge in here if charge.inflight)]:
            if book.active_tokens <= book.budget_tokens:
                break
            self._strike(charge)

    def forget_slot(self, slot: int) -> None:
        """The rank is gone, and all contexts on it."""
        for charge in [charges[slot] for charges in self._charges.values() if slot in charges]:
            self._strike(charge)
        self._books.pop(slot, None)

    def _strike(self, charge: Charge) -> None:
        """End a charge."""
        self._take_out(charge)
        charges = self._charges[charge.conversation]
        del charges[charge.slot]
        if not charges:
            del self._charges[charge.conversation]
        self.on_changed(charge.conversation, charge.slot)

    def _take_out(self, charge: Charge) -> None:
        """Take a charge out of its rank's book."""
        book = self.book(charge.slot)
        if charge.is_lapsable:
            del book.lapsable[charge.conversation]
            book.lapsable_tokens -= charge.tokens
        else:
            book.idle.pop(charge.conversation, None)
            book.active_tokens -= charge.tokens
        charge.is_lapsable = False
