"""The last decisions with their evidence: every rank's price, what was expected and what came of it.

Bounded twice, by requests and by priced ranks. Holds no text of a prompt, and sessions only as hashes.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Final

from router.core.types import Decision, FleetView, Price, RankId, Reason, SessionKey

MAX_REQUESTS = 1000
MAX_ROWS = 200_000
_PRICE_FIELDS = len(Price._fields)
_NO_PRICES: Final = array("d")


@dataclass(frozen=True, slots=True)
class Weighed:
    """One rank as a decision saw it. Without a price where the policy sets none, or the rank was no candidate; where it
    ``is_failing``, it was none while there were others.
    """

    id: RankId
    reusable_tokens: int
    trust_ratio: float
    price: Price | None
    is_failing: bool


@dataclass(slots=True)
class Waiting:
    """A request that is held, or was: why, its place when somebody asks (None once it waits no more), and, when that is
    over, how it ended and after how many ``seconds``.
    """

    why: str
    position: Callable[[], int | None]
    end: str | None = None
    seconds: float | None = None


class Attempted:
    """One attempt. What came of it is None until it is over, and where the worker does not say.

    ``slots``, ``trusts`` and the flat ``prices`` are what ``ranks`` unpacks: a decision is taken thousands of times
    for each time that somebody looks at it.
    """

    __slots__ = (
        "alone_seconds",
        "best_cached_tokens",
        "cached_tokens",
        "expected_cached_tokens",
        "expected_prefill_seconds",
        "failing",
        "first_token_seconds",
        "id",
        "outcome",
        "pair_seconds",
        "prefill_id",
        "prices",
        "prompt_tokens",
        "reason",
        "reusable_tokens",
        "seconds",
        "slots",
        "started",
        "trusts",
    )

    def __init__(
        self,
        decision: Decision,
        *,
        slots: Sequence[tuple[int, RankId]],
        trusts: array[float],
        reusable_tokens: Mapping[int, int],
        failing: frozenset[int],
        started: float,
    ) -> None:
        self.id: RankId = decision.id
        self.reason: Reason = decision.reason
        self.expected_cached_tokens: int = decision.expected_cached_tokens
        self.best_cached_tokens: int = decision.best_cached_tokens
        self.expected_prefill_seconds: float = decision.expected_prefill_seconds
        self.started = started
        self.slots = slots
        self.trusts = trusts
        self.prices: array[float] = array("d", chain.from_iterable(decision.prices)) if decision.prices else _NO_PRICES
        self.reusable_tokens = reusable_tokens
        self.failing = failing
        #: Of a pair: the rank that computes the prompt.
        self.prefill_id: RankId | None = decision.prefill.id if decision.prefill is not None else None
        self.pair_seconds: float | None = decision.pair_seconds
        self.alone_seconds: float | None = decision.alone_seconds
        self.first_token_seconds: float | None = None
        self.seconds: float | None = None
        self.outcome: str | None = None
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None

    def ranks(self) -> Iterator[Weighed]:
        """Every rank that was known, by slot."""
        rows = (self.prices[at : at + _PRICE_FIELDS] for at in range(0, len(self.prices), _PRICE_FIELDS))
        prices = {int(row[0]): Price(int(row[0]), *row[1:]) for row in rows}
        for (slot, rank_id), trust in zip(self.slots, self.trusts, strict=True):
            yield Weighed(
                rank_id, self.reusable_tokens.get(slot, 0), trust, prices.get(slot), is_failing=slot in self.failing
            )


class Decided:
    """One request and its attempts, and what it is or was ``waiting`` for. ``session`` is a hash; ``keyed`` says how
    its prompt was recognised.
    """

    __slots__ = (
        "attempts",
        "home",
        "ideal_tokens",
        "keyed",
        "model",
        "prompt_tokens",
        "request_id",
        "session",
        "tenant",
        "waiting",
    )

    def __init__(
        self,
        request_id: str,
        model: str,
        *,
        tenant: str,
        session: str | None,
        keyed: str,
        prompt_tokens: int,
        ideal_tokens: int,
    ) -> None:
        self.request_id = request_id
        self.model = model
        self.tenant = tenant
        self.session = session
        self.home: RankId | None = None
        self.keyed = keyed
        self.prompt_tokens = prompt_tokens
        self.ideal_tokens = ideal_tokens
        self.attempts: list[Attempted] = []
        self.waiting: Waiting | None = None


class DecisionLog:
    """The last decisions by request id; of two requests with one id, the later.

    ``on_close`` hears of each attempt as it ends.
    """

    def __init__(
        self,
        *,
        max_requests: int = MAX_REQUESTS,
        max_rows: int = MAX_ROWS,
        on_close: Callable[[Decided, Attempted], None] | None = None,
    ) -> None:
        self._max_requests = max_requests
        self._max_rows = max_rows
        self._on_close = on_close
        self._decided: OrderedDict[str, Decided] = OrderedDict()
        self._rows = 0
        self._slots: tuple[int, Sequence[tuple[int, RankId]]] = (-1, ())

    def __len__(self) -> int:
        return len(self._decided)

    def open(self, decided: Decided) -> None:
        """A request whose attempts will follow."""
        if decided.request_id in self._decided:
            self._drop(self._decided.pop(decided.request_id))
        self._decided[decided.request_id] = decided
        self._forget()

    def add(
        self,
        decided: Decided,
        decision: Decision,
        *,
        view: FleetView,
        reusable: Mapping[int, int],
        failing: frozenset[int] = frozenset(),
        now: float,
    ) -> Attempted:
        """An attempt begins; ``failing`` are slots that were given nothing while there were others."""
        attempted = Attempted(
            decision,
            slots=self._known(view),
            trusts=array("d", [rank.trust.ratio for rank in view.ranks]),
            reusable_tokens=reusable,
            failing=failing,
            started=now,
        )
        decided.attempts.append(attempted)
        if self._decided.get(decided.request_id) is decided:
            self._rows += len(attempted.slots)
        self._forget()
        return attempted

    def close(self, decided: Decided, attempted: Attempted) -> None:
        """The attempt is over, and says how."""
        if self._on_close is not None:
            self._on_close(decided, attempted)

    def find(self, request_id: str) -> Decided | None:
        """The request of that id, if it is still remembered."""
        return self._decided.get(request_id)

    def recent(self, limit: int) -> list[Decided]:
        """The last requests, the latest first."""
        latest = reversed(self._decided.values())
        return [decided for decided, _ in zip(latest, range(limit), strict=False)]

    def _known(self, view: FleetView) -> Sequence[tuple[int, RankId]]:
        """Slots and names of a view's ranks, shared by all attempts under it."""
        if self._slots[0] != view.version:
            self._slots = (view.version, tuple((rank.slot, rank.id) for rank in view.ranks))
        return self._slots[1]

    def _forget(self) -> None:
        """The oldest, beyond the bounds."""
        while len(self._decided) > self._max_requests or (self._rows > self._max_rows and len(self._decided) > 1):
            self._drop(self._decided.popitem(last=False)[1])

    def _drop(self, decided: Decided) -> None:
        for attempted in decided.attempts:
            self._rows -= len(attempted.slots)


@lru_cache(maxsize=4096)
def session_hash(session: SessionKey | None) -> str | None:
    """A name for a session by which its requests are told apart and nobody is recognised."""
    if session is None:
        return None
    return hashlib.blake2s("\x00".join(session).encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
