"""What several replicas of the router know in common: the interface, its embedded default, and the books behind it.

A request never waits for a store: homes of sessions are answered from this process's own book, which the other
replicas' news keep fresh. The books are plain values with a clock handed in; ``redis_state`` moves their content.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, Protocol

from router.core.load import add_loads, lasting_seconds, recent_seconds
from router.core.returns import Conversation
from router.core.types import RankId, RankLoad, SessionKey
from router.wire.redis import Charged, RankWork


@dataclass(slots=True)
class SharedHome:
    """A session's home as all replicas know it. Written by ``HomeBook`` alone.

    ``prompt_tokens`` is the session's prompt when it was last sent there. ``heard_at`` is when this process last knew
    this to be everybody's view, ``told_at`` when the others were last told. ``is_own``: this process sent the last
    request.
    """

    rank: RankId
    used_at: float
    prompt_tokens: int
    heard_at: float
    told_at: float = -math.inf
    is_own: bool = False
    #: Of what this process sent: whose home it is.
    conversation: Conversation | None = None


class ConversationCharge(NamedTuple):
    """What this process charges a conversation with on a rank, as ``wire.redis.Charged`` tells it."""

    conversation: Conversation
    rank: RankId
    tokens: int | None


class ChangedCharges(Protocol):
    """What this process charges otherwise than it last said; ``whole``: all of it. Whether it is all comes first."""

    def __call__(self, *, whole: bool) -> tuple[bool, Sequence[ConversationCharge]]: ...


class SharedState(Protocol):
    """State common to the replicas. Nothing here raises or blocks; ``look_up`` ends within a few milliseconds."""

    @property
    def is_shared(self) -> bool:
        """There may be other replicas."""

    def charges(self, model: str, session: SessionKey) -> Mapping[RankId, int]:
        """Where other replicas charge the session, as far as this process has heard, each with the tokens that it will
        give up as soon as this one serves it.
        """

    def home(self, model: str, session: SessionKey, *, is_prefill: bool = False) -> SharedHome | None:
        """Where any replica last sent the session, as far as this process has heard. ``is_prefill``: for its prompt to
        be computed, not answered.
        """

    async def look_up(self, model: str, session: SessionKey, *, in_pairs: bool = False) -> None:
        """Ask the store for a session of which this process knows nothing; ``in_pairs``: for its prefill rank too."""

    def bound(
        self, model: str, session: SessionKey, rank: RankId, *, prompt_tokens: int, is_prefill: bool = False
    ) -> None:
        """This process has sent, or just ended, a request of the session there; tell the others."""


class Embedded:
    """One replica: its own books are all there is."""

    is_shared = False

    def charges(self, model: str, session: SessionKey) -> Mapping[RankId, int]:
        return {}

    def home(self, model: str, session: SessionKey, *, is_prefill: bool = False) -> None:
        return None

    async def look_up(self, model: str, session: SessionKey, *, in_pairs: bool = False) -> None:
        return

    def bound(
        self, model: str, session: SessionKey, rank: RankId, *, prompt_tokens: int, is_prefill: bool = False
    ) -> None:
        return


#: Recent work too little to be worth telling.
_FAINT_SECONDS = 1e-3
#: News is as late as this at most, as a rule; nearer uses cannot be put in order.
_SAME_MOMENT_SECONDS = 0.05


class HomeBook:
    """Homes of sessions by digest, the least recently used first: bounded, forgetful of the idle, the newest wins.

    ``untold`` are those that the others still have to be told of.
    """

    def __init__(self, *, max_sessions: int, idle_seconds: float) -> None:
        self.max_sessions = max_sessions
        self.idle_seconds = idle_seconds
        #: A use in the same place is told again only after so long: before the others forget, and seldom.
        self.refresh_seconds = min(60.0, idle_seconds / 8)
        self._homes: OrderedDict[bytes, SharedHome] = OrderedDict()
        self._untold: dict[bytes, None] = {}
        self._gap_at = -math.inf

    def __len__(self) -> int:
        return len(self._homes)

    @property
    def has_untold(self) -> bool:
        """Somebody must be told something."""
        return bool(self._untold)

    def get(self, digest: bytes, *, now: float) -> SharedHome | None:
        """The home, unless it has been idle for too long."""
        home = self._homes.get(digest)
        return home if home is not None and now - home.used_at <= self.idle_seconds else None

    def is_certain(self, digest: bytes, *, now: float) -> bool:
        """No news of this session can have been missed since it was last heard of."""
        home = self.get(digest, now=now)
        return home is not None and home.heard_at >= self._gap_at

    def gap(self, *, now: float) -> None:
        """News may have been missed until now."""
        self._gap_at = now

    def confirm(self, digest: bytes, *, now: float) -> None:
        """The store knows nothing newer."""
        if (home := self._homes.get(digest)) is not None:
            home.heard_at = now

    def use(
        self,
        digest: bytes,
        rank: RankId,
        *,
        prompt_tokens: int,
        now: float,
        conversation: Conversation | None = None,
    ) -> None:
        """This process sends the session there, or its request there has just ended."""
        home = self._homes.get(digest)
        if home is None or home.rank != rank or not home.is_own:  # it must be told by whom it is served now
            home = self._put(digest, SharedHome(rank, now, prompt_tokens, heard_at=now))
        home.conversation = conversation
        home.used_at = home.heard_at = now
        home.prompt_tokens = prompt_tokens
        home.is_own = True
        self._homes.move_to_end(digest)
        if now - home.told_at >= self.refresh_seconds:
            self._untold[digest] = None

    def hear(
        self, digest: bytes, rank: RankId, *, used_at: float, prompt_tokens: int, now: float
    ) -> Conversation | None:
        """Another replica, or the store, says that the session was last used there at ``used_at``.

        Of two uses at the same moment at two replicas neither can tell the later: both take the lesser rank.
        Returns the conversation if it was this process that served it until then.
        """
        home = self._homes.get(digest)
        is_rival = home is not None and home.is_own and home.rank != rank
        if home is not None and is_rival and abs(home.used_at - used_at) <= _SAME_MOMENT_SECONDS:
            used_at = home.used_at if rank < home.rank else -math.inf
        if home is not None and home.used_at > used_at:
            home.heard_at = now
            if home.rank != rank and home.is_own:
                self._untold[digest] = None  # they do not know yet that it has moved on
            return None
        self._untold.pop(digest, None)
        self._put(digest, SharedHome(rank, used_at, prompt_tokens, heard_at=now, told_at=used_at))
        return home.conversation if home is not None and home.is_own else None

    def take_untold(self, limit: int, *, now: float) -> list[tuple[bytes, SharedHome]]:
        """Some of what is to be told; it counts as told."""
        taken: list[tuple[bytes, SharedHome]] = []
        for digest in list(islice(self._untold, limit)):
            del self._untold[digest]
            if (home := self.get(digest, now=now)) is not None:
                home.told_at = now
                taken.append((digest, home))
        return taken

    def not_told(self, homes: Iterable[tuple[bytes, SharedHome]]) -> None:
        """The store has not taken these. They are told again when they are next used, or by ``tell_again``."""
        for _, home in homes:
            home.told_at = -math.inf

    def tell_again(self) -> None:
        """The store may have lost everything, or the others missed it: tell all that this process sent somewhere."""
        self._untold = {digest: None for digest, home in reversed(self._homes.items()) if home.is_own}

    def _put(self, digest: bytes, home: SharedHome) -> SharedHome:
        self._homes[digest] = home
        self._homes.move_to_end(digest)
        if len(self._homes) > self.max_sessions:
            forgotten, _ = self._homes.popitem(last=False)
            self._untold.pop(forgotten, None)
        return home


@dataclass(slots=True)
class _Peer:
    heard_at: float
    loads: Mapping[RankId, RankLoad] = field(default_factory=dict)
    charges: dict[bytes, dict[RankId, int]] = field(default_factory=dict)


class PeerLoads:
    """The work that the other replicas have on each rank, and whom they charge there. What a replica told ends with its
    lease, and what it told of charges when news may have been missed: nobody must be credited with a charge that has
    ended.

    Methods return the ranks whose sum may have changed.
    """

    def __init__(self, *, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self._peers: dict[str, _Peer] = {}

    def __len__(self) -> int:
        return len(self._peers)

    def __contains__(self, replica: str) -> bool:
        return replica in self._peers

    def hear(
        self,
        replica: str,
        loads: Mapping[RankId, RankLoad],
        *,
        now: float,
        charges: Iterable[Charged] = (),
        is_whole: bool = False,
    ) -> set[RankId]:
        """A replica tells all its work; ranks it does not name have none. ``charges`` have changed, or are all."""
        before = self._peers.get(replica)
        peer = self._peers[replica] = _Peer(now, loads)
        if before is not None and not is_whole:
            peer.charges = before.charges
        for charged in charges:
            of_session = peer.charges.setdefault(charged.digest, {})
            rank = RankId(charged.worker, charged.rank)
            if charged.tokens is not None:
                of_session[rank] = charged.tokens
            else:
                of_session.pop(rank, None)
            if not of_session:
                del peer.charges[charged.digest]
        return {*loads, *(before.loads if before else ())}

    def gap(self) -> None:
        """News may have been missed."""
        for peer in self._peers.values():
            peer.charges = {}

    def charges(self, digest: bytes) -> dict[RankId, int]:
        """What the others charge a session with, by rank."""
        found: dict[RankId, int] = {}
        for peer in self._peers.values():
            for rank, tokens in peer.charges.get(digest, {}).items():
                found[rank] = found.get(rank, 0) + tokens
        return found

    def forget(self, replica: str) -> set[RankId]:
        """A replica has stopped."""
        peer = self._peers.pop(replica, None)
        return set(peer.loads) if peer else set()

    def expire(self, *, now: float) -> set[RankId]:
        """Forget the replicas that have been silent for a lease."""
        silent = [name for name, peer in self._peers.items() if now - peer.heard_at > self.lease_seconds]
        return {rank for name in silent for rank in self.forget(name)}

    def total(self, rank: RankId, *, now: float) -> RankLoad:
        """The work of all others on a rank."""
        total = RankLoad()
        add_loads(total, (peer.loads[rank] for peer in self._peers.values() if rank in peer.loads), now=now)
        return total


def tell_loads(
    loads: Iterable[tuple[RankId, RankLoad]], *, now: float, charged_tokens: Mapping[RankId, int] | None = None
) -> list[RankWork]:
    """This replica's work as it is told to the others: times as ages, idle ranks left out. ``charged_tokens`` are the
    contexts that it has admitted.
    """
    charged_tokens = charged_tokens or {}
    return [
        RankWork(
            worker=rank.worker,
            rank=rank.rank,
            inflight=load.inflight,
            inflight_tokens=load.inflight_tokens,
            waiting=load.waiting,
            waiting_tokens=load.waiting_tokens,
            waiting_seconds=max(0.0, load.waiting_seconds),
            served_seconds=now - load.serving_since,
            serving_seconds=load.serving_seconds,
            recent_seconds=recent_seconds(load, now=now),
            lasting_seconds=lasting,
            charged_tokens=charged_tokens.get(rank, 0),
        )
        for rank, load in loads
        if (lasting := lasting_seconds(load, now=now)) > _FAINT_SECONDS or load.inflight or charged_tokens.get(rank)
    ]


def hear_loads(works: Iterable[RankWork], *, now: float) -> dict[RankId, RankLoad]:
    """Another replica's work in this process's time."""
    return {
        RankId(work.worker, work.rank): RankLoad(
            inflight=work.inflight,
            inflight_tokens=work.inflight_tokens,
            waiting=work.waiting,
            waiting_tokens=work.waiting_tokens,
            waiting_seconds=work.waiting_seconds,
            serving_since=now - work.served_seconds,
            serving_seconds=work.serving_seconds,
            recent_seconds=work.recent_seconds,
            lasting_seconds=work.lasting_seconds,
            recent_at=now,
            charged_tokens=work.charged_tokens,
        )
        for work in works
    }
