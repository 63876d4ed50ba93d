"""The books that replicas share: homes of sessions, the others' load, and one queue made of both."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from router.core.load import LoadBook, lasting_seconds, recent_seconds, wait_seconds
from router.core.pace import prior
from router.core.types import Engine, RankId, RankLoad, SessionKey
from router.fleet.fleet import Fleet
from router.fleet.shared import Embedded, HomeBook, PeerLoads, SharedHome
from router.fleet.target import Target
from router.settings import RoutingSettings
from router.telemetry.metrics import Metrics
from router.wire.redis import Charged

A, B, C = RankId("w", 0), RankId("w", 1), RankId("x", 0)
S, T = b"s" * 16, b"t" * 16


def book(*, max_sessions: int = 100, idle_seconds: float = 800.0) -> HomeBook:
    return HomeBook(max_sessions=max_sessions, idle_seconds=idle_seconds)


def told(homes: HomeBook, *, now: float) -> list[bytes]:
    return [digest for digest, _ in homes.take_untold(10, now=now)]


# --- homes of sessions --------------------------------------------------------------------------------


def test_a_use_in_the_same_place_is_told_seldom_and_a_move_at_once() -> None:
    """800 s of idleness allow a refresh of 100 s, but a minute is the most."""
    homes = book()
    homes.use(S, A, prompt_tokens=5, now=0.0)
    assert told(homes, now=0.0) == [S]
    homes.use(S, A, prompt_tokens=6, now=59.0)
    assert told(homes, now=59.0) == []
    homes.use(S, A, prompt_tokens=7, now=60.0)
    assert told(homes, now=60.0) == [S]
    homes.use(S, B, prompt_tokens=8, now=61.0)
    assert told(homes, now=61.0) == [S]


def test_the_latest_use_anywhere_is_the_home() -> None:
    """Older news changes nothing; newer news does; and who holds newer tells those who do not know."""
    homes = book()
    homes.use(S, A, prompt_tokens=5, now=10.0)
    told(homes, now=10.0)
    homes.hear(S, B, used_at=9.0, prompt_tokens=4, now=11.0)
    home = homes.get(S, now=11.0)
    assert home is not None
    assert home.rank == A
    assert told(homes, now=11.0) == [S], "the other replica must learn of A"
    homes.hear(S, B, used_at=12.0, prompt_tokens=9, now=12.5)
    home = homes.get(S, now=12.5)
    assert home is not None
    assert (home.rank, home.prompt_tokens, home.is_own) == (B, 9, False)
    assert told(homes, now=13.0) == []
    homes.use(S, A, prompt_tokens=10, now=14.0)
    assert told(homes, now=14.0) == [S], "it was told once of A, but everybody knows B since"


def test_two_replicas_that_bind_a_session_at_once_end_in_one_place() -> None:
    """Each hears of the other's binding a little later than its own: both take the lesser rank, whoever was first."""
    for first, second in ((A, B), (B, A)):
        one, other = book(), book()
        one.use(S, first, prompt_tokens=1, now=10.0)
        other.use(S, second, prompt_tokens=1, now=10.001)
        one.hear(S, second, used_at=10.003, prompt_tokens=1, now=10.003)
        other.hear(S, first, used_at=10.002, prompt_tokens=1, now=10.002)
        homes = [each.get(S, now=11.0) for each in (one, other)]
        assert [home.rank for home in homes if home] == [A, A]


def test_news_of_the_same_home_is_not_answered() -> None:
    """Two replicas that agree are quiet."""
    homes = book()
    homes.use(S, A, prompt_tokens=5, now=10.0)
    told(homes, now=10.0)
    homes.hear(S, A, used_at=9.0, prompt_tokens=4, now=11.0)
    assert told(homes, now=11.0) == []


def test_an_idle_home_is_none() -> None:
    """After ``idle_seconds``, and it is not told any more."""
    homes = book(idle_seconds=8.0)
    homes.use(S, A, prompt_tokens=5, now=0.0)
    assert homes.get(S, now=8.0) is not None
    assert homes.get(S, now=8.1) is None
    assert told(homes, now=8.1) == []


def test_after_a_gap_in_the_news_a_home_is_uncertain_until_heard_of() -> None:
    """Used here, heard of, or confirmed by the store."""
    homes = book()
    homes.use(S, A, prompt_tokens=1, now=0.0)
    homes.hear(T, A, used_at=0.0, prompt_tokens=1, now=0.0)
    assert homes.is_certain(S, now=1.0)
    homes.gap(now=2.0)
    assert not homes.is_certain(S, now=3.0)
    homes.use(S, A, prompt_tokens=1, now=3.0)
    assert homes.is_certain(S, now=3.0)
    assert not homes.is_certain(T, now=3.0)
    homes.confirm(T, now=3.0)
    assert homes.is_certain(T, now=3.0)
    homes.confirm(b"unknown", now=3.0)
    assert not homes.is_certain(b"unknown", now=3.0)


def test_what_the_store_did_not_take_is_told_with_the_next_use() -> None:
    """A refusal is no reason to ask again at once, nor to wait for the refresh."""
    homes = book()
    homes.use(S, A, prompt_tokens=1, now=0.0)
    homes.not_told(homes.take_untold(10, now=0.0))
    assert not homes.has_untold
    homes.use(S, A, prompt_tokens=1, now=1.0)
    assert told(homes, now=1.0) == [S]


def test_after_a_reconnection_only_what_was_sent_from_here_is_told_again_the_latest_first() -> None:
    """The others tell theirs."""
    homes = book()
    for number, digest in enumerate((S, T)):
        homes.use(digest, A, prompt_tokens=1, now=float(number))
    homes.hear(b"u", B, used_at=5.0, prompt_tokens=1, now=5.0)
    told(homes, now=6.0)
    homes.tell_again()
    assert told(homes, now=7.0) == [T, S]


def test_memory_is_bounded() -> None:
    """The least recently used go, from the list of what is to be told too."""
    homes = book(max_sessions=10)
    for number in range(100):
        homes.use(number.to_bytes(16), A, prompt_tokens=1, now=float(number))
        homes.hear((1000 + number).to_bytes(16), B, used_at=float(number), prompt_tokens=1, now=float(number))
    assert len(homes) == 10
    assert len(homes.take_untold(1000, now=100.0)) == 5


@dataclass
class Told:
    """A channel between books that passes everything on, late but in order."""

    books: list[HomeBook] = field(default_factory=lambda: [book() for _ in range(3)])
    queues: dict[tuple[int, int], list[tuple[bytes, SharedHome]]] = field(default_factory=dict)

    def flush(self, sender: int, *, now: float) -> None:
        for digest, home in self.books[sender].take_untold(1000, now=now):
            copy = SharedHome(home.rank, home.used_at, home.prompt_tokens, heard_at=now)
            for receiver in range(3):
                if receiver != sender:
                    self.queues.setdefault((sender, receiver), []).append((digest, copy))

    def deliver(self, sender: int, receiver: int, *, now: float) -> None:
        for digest, home in self.queues.pop((sender, receiver), []):
            self.books[receiver].hear(
                digest, home.rank, used_at=home.used_at, prompt_tokens=home.prompt_tokens, now=now
            )


MOVE = st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from([A, B, C]))


@given(st.lists(st.one_of(MOVE.map(lambda move: ("use", *move)), st.tuples(st.just("news"), st.integers(0, 5)))))
def test_replicas_agree_once_all_news_has_arrived(steps: list[tuple[object, ...]]) -> None:
    """Any uses at any replicas, any delays: in the end each session is where it was used last, for all."""
    channel, last = Told(), dict[bytes, RankId]()
    pairs = [(a, b) for a, b in itertools.product(range(3), range(3)) if a != b]
    now = 0.0
    for step in steps:
        now += 1.0
        match step:
            case ("use", int(replica), int(session), RankId() as rank):
                digest = bytes([session])
                channel.books[replica].use(digest, rank, prompt_tokens=1, now=now)
                last[digest] = rank
                channel.flush(replica, now=now)
            case ("news", int(pair)):
                channel.deliver(*pairs[pair], now=now)
    for _ in range(3):
        for sender, receiver in pairs:
            channel.flush(sender, now=now)
            channel.deliver(sender, receiver, now=now)
    for homes in channel.books:
        assert {digest: home.rank for digest in last if (home := homes.get(digest, now=now))} == last


# --- load -----------------------------------------------------------------------------------------------


def test_the_load_of_a_silent_replica_ends_with_its_lease() -> None:
    """One second after its last word; who goes on speaking stays."""
    peers = PeerLoads(lease_seconds=1.0)
    assert peers.hear("one", {A: RankLoad(inflight=2), B: RankLoad(inflight=1)}, now=0.0) == {A, B}
    assert peers.hear("two", {A: RankLoad(inflight=5)}, now=0.5) == {A}
    assert peers.total(A, now=0.5).inflight == 7
    assert peers.expire(now=1.0) == set()
    assert peers.expire(now=1.1) == {A, B}
    assert (peers.total(A, now=1.1).inflight, peers.total(B, now=1.1).inflight, len(peers)) == (5, 0, 1)
    assert peers.hear("two", {}, now=1.2) == {A}, "ranks it no longer names have none"
    assert peers.total(A, now=1.2).inflight == 0
    assert peers.forget("two") == set()
    assert peers.forget("nobody") == set()


def test_prices_see_own_and_other_work_as_one_queue() -> None:
    """Wait = 2 s own and 3 s elsewhere, less the half second since the later of both began; recent work fades alone."""
    loads = LoadBook(is_shared=True)
    total, own = loads.total(0), loads.load(0)
    claim = loads.open(0, prompt_tokens=100, prefill_tokens=80, seconds=2.0, now=10.0)
    assert (total.inflight, total.waiting_tokens) == (1, 80)
    elsewhere = RankLoad(3, 300, 1, 3.0, 60, serving_since=10.5, serving_seconds=3.0, recent_at=10.5)
    elsewhere.recent_seconds, elsewhere.lasting_seconds = 4.0, 6.0
    loads.set_elsewhere(0, elsewhere, now=10.5)
    assert (total.inflight, total.inflight_tokens, total.waiting, total.waiting_tokens) == (4, 400, 2, 140)
    assert wait_seconds(total, prior(1000), now=11.0) == pytest.approx(4.5)
    expected = 2.0 * math.exp2(-10.0 / 180.0) + 4.0 * math.exp2(-9.5 / 180.0)
    assert recent_seconds(total, now=20.0) == pytest.approx(expected)
    expected = 2.0 * math.exp2(-10.0 / 900.0) + 6.0 * math.exp2(-9.5 / 900.0)
    assert lasting_seconds(total, now=20.0) == pytest.approx(expected)
    assert own.inflight == 1
    assert loads.first_byte(claim, now=11.5) == pytest.approx(1.0), "the rank turned to it at 10.5"
    assert total.waiting == 1
    loads.close(claim, now=12.0)
    assert (own.inflight, total.inflight) == (0, 3)
    loads.set_elsewhere(0, RankLoad(), now=13.0)
    assert (total.inflight, total.waiting_seconds) == (0, 0.0)


def test_alone_a_router_prices_its_own_cells() -> None:
    """No second copy is kept, and a rank that returns in the same slot starts from nothing."""
    alone, shared = LoadBook(), LoadBook(is_shared=True)
    assert alone.total(0) is alone.load(0)
    shared.set_elsewhere(0, RankLoad(inflight=2), now=0.0)
    shared.forget(0)
    assert shared.total(0).inflight == 0


# --- the fleet ---------------------------------------------------------------------------------------------


def test_charges_are_credited_for_as_long_as_they_are_told() -> None:
    """Two replicas charge a session; the one gives a charge up, the other tells anew all that it has, none of it; news
    may have been missed; a lease ends."""
    peers = PeerLoads(lease_seconds=1.0)

    def tell(replica: str, tokens: int | None, *, is_whole: bool = False, rank: RankId = A) -> None:
        charges = [Charged(S, *rank, tokens)]
        peers.hear(replica, {}, now=0.0, charges=charges, is_whole=is_whole)

    tell("one", 100)
    tell("other", 20)
    tell("other", 0, rank=B)
    assert peers.charges(S) == {A: 120, B: 0}
    assert peers.charges(T) == {}
    peers.hear("one", {}, now=0.0)
    tell("one", None)
    tell("one", None, rank=C)
    assert peers.charges(S) == {A: 20, B: 0}
    tell("other", 7, is_whole=True)
    assert peers.charges(S) == {A: 7}
    peers.gap()
    assert peers.charges(S) == {}
    tell("other", 9)
    assert peers.charges(S) == {A: 9}
    peers.expire(now=2.0)
    assert peers.charges(S) == {}


class Heard(Embedded):
    """What other replicas are said to have done."""

    is_shared = True

    def __init__(self) -> None:
        self.homes: dict[SessionKey, SharedHome] = {}

    def home(  # type: ignore[override]
        self, model: str, session: SessionKey, *, is_prefill: bool = False
    ) -> SharedHome | None:
        return None if is_prefill else self.homes.get(session)


def test_a_session_used_later_at_another_replica_is_at_home_there() -> None:
    """Later than here: adopted; earlier, or on an unknown rank: not. With that rank gone: where it was before."""
    heard, session = Heard(), SessionKey("t", "s")
    fleet = Fleet(RoutingSettings(), Metrics(CollectorRegistry()), clock=lambda: 0.0, shared=heard)
    slots = [
        fleet.add_rank(
            rank,
            target=Target("127.0.0.1", 1, rank.rank, 2, Engine.SHIM),
            models=frozenset({"m"}),
            block_tokens=16,
            pool_tokens=None,
        )
        for rank in (A, B)
    ]
    assert fleet.home("m", session, now=1.0) is None
    heard.homes[session] = SharedHome(A, used_at=1.0, prompt_tokens=1, heard_at=1.0)
    assert fleet.home("m", session, now=2.0) == slots[0]
    binding = fleet.sessions.start("m", session, slot=slots[1], now=3.0)
    fleet.sessions.finish("m", session, binding, now=3.0)
    assert fleet.home("m", session, now=4.0) == slots[1]
    heard.homes[session] = SharedHome(A, used_at=5.0, prompt_tokens=1, heard_at=5.0)
    assert fleet.home("m", session, now=6.0) == slots[0]
    heard.homes[session] = SharedHome(C, used_at=7.0, prompt_tokens=1, heard_at=7.0)
    assert fleet.home("m", session, now=8.0) == slots[0]
    fleet.remove_rank(slots[0])
    heard.homes[session] = SharedHome(A, used_at=9.0, prompt_tokens=1, heard_at=9.0)
    assert fleet.home("m", session, now=10.0) == slots[1]
    fleet.set_elsewhere(A, RankLoad(inflight=1))
    fleet.set_elsewhere(B, RankLoad(inflight=1))
    assert [rank.load.inflight for rank in fleet.view.ranks] == [1]
