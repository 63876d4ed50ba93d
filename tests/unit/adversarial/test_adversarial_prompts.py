"""Prompts that look alike and are not, ids that lie, and a prefill so long that it looks like a death."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from itertools import takewhile

import pytest

from loadtest.simulate.comparators import Asked, comparator
from router.core.breaker import BreakerParameters, Breakers, BreakerState, Verdict
from router.core.cost import CostParameters
from router.core.load import LoadBook, explains_silence, wait_seconds
from router.core.pace import prefill_seconds, prior
from router.core.policy import Affinity
from router.core.session import identify
from router.core.session_table import SessionTable
from router.core.types import (
    FleetView,
    RankView,
    Reason,
    RouteRequest,
    SessionKey,
)
from router.proxy.types import Outcome
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.openai import Endpoint, parse_request
from tests.fakes.brain_world import BLOCK, World
from tests.fakes.rank_views import rank_view

SYSTEM = list(range(100, 100 + 40 * BLOCK))
TURN = list(range(5000, 5000 + 4 * BLOCK))


async def cached(world: World, prompt: list[int], *, tenant: str = "t", session: str = "", **fields: object) -> int:
    """Send a prompt, let it end well, and say what was expected of a cache; its blocks are known from then on."""
    body = json.dumps({"model": "m", "prompt": prompt, **fields}).encode()
    headers = {"x-session-id": session} if session else {}
    prepared = await world.brain.prepare(parse_request(Endpoint.COMPLETIONS, body), headers, tenant=tenant)
    attempt = world.brain.choose(prepared)
    attempt.lease.first_byte()
    attempt.lease.close(Outcome.OK, None)
    return attempt.decision.expected_cached_tokens


# --- 7: the same first blocks, and yet not the same prefix --------------------------------------------


async def test_a_tenants_blocks_are_nobody_elses_under_a_salt() -> None:
    """Equal prompts under two salts share nothing, under one everything. Keys without a namespace would be the same."""
    world, prompt = World(ranks=1), [*SYSTEM, *TURN]
    assert await cached(world, prompt, cache_salt="a") == 0
    assert await cached(world, prompt, cache_salt="b") == 0
    assert await cached(world, prompt, cache_salt="a") == len(prompt) - BLOCK

    salted = [block_keys(prompt, block_tokens=BLOCK, parent=namespace_seed("", salt)) for salt in ("a", "b", "")]
    assert not set(salted[0]) & set(salted[1]) | set(salted[0]) & set(salted[2])


async def test_one_session_id_of_two_tenants_is_two_sessions() -> None:
    """The second tenant's first request is not sent to the first one's home, which is busy."""
    world = World(ranks=2)
    body = json.dumps({"model": "m", "prompt": SYSTEM, "cache_salt": "mine"}).encode()
    headers = {"x-session-id": "same"}
    first = world.brain.choose(
        await world.brain.prepare(parse_request(Endpoint.COMPLETIONS, body), headers, tenant="t1")
    )
    other = json.dumps({"model": "m", "prompt": SYSTEM, "cache_salt": "theirs"}).encode()
    second = world.brain.choose(
        await world.brain.prepare(parse_request(Endpoint.COMPLETIONS, other), headers, tenant="t2")
    )

    assert first.decision.slot != second.decision.slot
    assert second.decision.reason is Reason.COLD
    assert len(world.fleet.sessions) == 2
    for attempt in (first, second):
        attempt.lease.close(Outcome.CLIENT_GONE, None)


async def test_a_marker_at_the_first_user_turn_leaves_the_system_prompt_shared() -> None:
    """A replay that marks each play's first user message: what stands before is reused, and nothing after."""
    world = World(ranks=1)
    assert await cached(world, [*SYSTEM, 7001, *TURN]) == 0

    assert await cached(world, [*SYSTEM, 7002, *TURN]) == len(SYSTEM)


async def test_one_token_in_the_system_prompt_costs_every_hit_and_is_not_believed_away() -> None:
    """Nothing is promised from the changed block on, however long the rest is; the unchanged prompt is still warm."""
    world = World(ranks=1)
    await cached(world, [*SYSTEM, *TURN])
    changed = [SYSTEM[0] + 9000, *SYSTEM[1:], *TURN]
    late = [*SYSTEM[: 3 * BLOCK], 9000, *SYSTEM[3 * BLOCK + 1 :], *TURN]

    assert await cached(world, changed) == 0
    assert await cached(world, late) == 3 * BLOCK
    assert await cached(world, [*SYSTEM, *TURN]) == len(SYSTEM) + len(TURN) - BLOCK


class Engines:
    """What ranks really hold: blocks, each under the salt that it was computed with."""

    def __init__(self) -> None:
        self._held: dict[int, set[tuple[str, tuple[int, ...]]]] = {}

    def serve(self, slot: int, salt: str, tokens: list[int]) -> int:
        """Tokens that the rank reuses of a prompt, which it holds from then on."""
        held = self._held.setdefault(slot, set())
        blocks = [(salt, tuple(tokens[:end])) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
        cached = sum(1 for _ in takewhile(held.__contains__, blocks[: (len(tokens) - 1) // BLOCK]))
        held.update(blocks)
        return cached * BLOCK


async def poisoned(name: str) -> list[tuple[int, int, int]]:
    """Sixteen tenants ask with one system prompt, each under a salt of its own, all at once; then each once more.

    Returns rank, expected and actual reuse of each request. ``smg`` keeps a tree of what was sent, as routers do that
    see text or tokens and no salt.
    """
    world, engines, policy, rng = World(ranks=4), Engines(), comparator("smg", CostParameters()), random.Random(1)
    sent: dict[int, set[tuple[int, ...]]] = {}
    last: int | None = None
    served = []
    for turn in range(2):
        under_way = []
        for tenant in range(16):
            tokens, salt = (
                [*SYSTEM, *range(9_000 + 100 * tenant, 9_000 + 100 * tenant + (turn + 1) * 2 * BLOCK)],
                f"{tenant}",
            )
            prepared = await world.prepare(tokens, {"x-session-id": f"s{tenant}"}, cache_salt=salt)
            if name == "smg":
                heads = [tuple(tokens[:end]) for end in range(BLOCK, len(tokens), BLOCK)]
                found = {
                    slot: BLOCK * sum(1 for _ in takewhile(known.__contains__, heads)) for slot, known in sent.items()
                }
                asked = Asked("m", len(tokens), 100, sent_tokens=found, last_slot=last)
                decision = policy(world.fleet.view, asked, rng, world.now)
                assert decision is not None
                last, expected = decision.slot, found.get(decision.slot, 0)
                sent.setdefault(last, set()).update(heads)
                lease = world.brain._leases.open(prepared, decision, now=world.now)
            else:
                attempt = world.brain.choose(prepared)
                decision, expected, lease = attempt.decision, attempt.decision.expected_cached_tokens, attempt.lease
            served.append((decision.slot, expected, engines.serve(decision.slot, salt, tokens)))
            under_way.append(lease)
        for lease in under_way:
            lease.first_byte()
            lease.close(Outcome.OK, None)
    return served


async def test_equal_prompts_that_share_nothing_are_not_piled_up_for_what_they_seem_to_share() -> None:
    """A router that knows no salt sends all sixteen to one rank, expecting a system prompt that is there for one of
    them. Ours expects of each what it finds, to the token, and spreads them.
    """
    ours, naive = await poisoned("affinity"), await poisoned("smg")

    assert all(expected == actual for _, expected, actual in ours)
    assert max(Counter(slot for slot, *_ in ours).values()) <= 2 * len(ours) / 4
    assert [actual for *_, actual in ours[16:]] == [len(SYSTEM) + 2 * BLOCK] * 16
    assert {slot for slot, *_ in naive} == {naive[0][0]}
    assert [expected - actual for _, expected, actual in naive[1:16]] == [len(SYSTEM)] * 15


# --- 8: ids ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"x-request-id": "r1"}, None),  # an id of one request names no session
        ({"x-parent-session-id": "p"}, None),  # a parent without a child
        ({"x-session-id": "s", "x-parent-session-id": "s"}, SessionKey("t", "s", "child of s")),  # its own parent
        ({"x-session-id": " "}, SessionKey("t", " ")),
    ],
)
def test_what_an_id_may_say(headers: dict[str, str], expected: SessionKey | None) -> None:
    """Whatever is sent there is a bounded name or none."""
    assert identify(headers, {}, tenant="t") == expected


def test_ids_without_bound_cost_the_table_no_memory() -> None:
    """Ids of 5,000 letters that differ in the last one are two sessions, each named in some forty letters."""
    keys = [identify({"x-session-id": "x" * 5_000 + last}, {}, tenant="t") for last in "ab"]

    assert keys[0] != keys[1]
    assert all(key is not None and len(key.session) < 64 for key in keys)


def test_an_id_for_each_request_pushes_no_running_session_out() -> None:
    """100,000 ids that never return: the table keeps its bound, and the one session at work keeps its home."""
    table, mine = SessionTable(max_sessions=100, idle_seconds=3600.0), SessionKey("t", "mine")
    table.start("m", mine, slot=3, now=0.0)
    for number in range(100_000):
        key = SessionKey("t", f"once {number}")
        table.finish("m", key, table.start("m", key, slot=0, now=1.0), now=1.0)

    assert len(table) <= 100
    assert table.home("m", mine, now=2.0) == 3


# --- 9: a prefill that looks like a death -------------------------------------------------------------

GIANT_TOKENS = 600_000


def rank(slot: int, book: LoadBook) -> RankView:
    return rank_view(
        slot,
        load=book.load(slot),
        pace=prior(20_000.0),
        pool_tokens=2_000_000,
    )


def test_a_rank_that_prefills_for_a_minute_is_neither_dead_nor_forgotten() -> None:
    """600,000 cold tokens take 75 s at the prior's pace; probes go unanswered all the while.

    Silence is explained until twice that and ten seconds more. The session keeps its home beyond the idle time that
    would have ended it, and others go around the rank. A router that counts three silent probes of five seconds, or
    forgets a session by its age, would have given both up.
    """
    book, table = LoadBook(), SessionTable(max_sessions=10, idle_seconds=30.0)
    view = FleetView((rank(0, book), rank(1, book)))
    seconds = prefill_seconds(view.ranks[0].pace, uncached_tokens=GIANT_TOKENS, context_tokens=GIANT_TOKENS)
    assert seconds == pytest.approx(GIANT_TOKENS / 20_000 * (1 + 0.5 * 3.0))
    giant, done = SessionKey("t", "giant"), SessionKey("t", "done")
    binding = table.start("m", giant, slot=0, now=0.0)
    table.finish("m", done, table.start("m", done, slot=0, now=0.0), now=0.0)
    claim = book.open(0, prompt_tokens=GIANT_TOKENS, prefill_tokens=GIANT_TOKENS, seconds=seconds, now=0.0)

    naive_verdict_at = 3 * 5.0
    for now in (naive_verdict_at, 60.0, 2 * seconds):
        assert explains_silence(view.ranks[0].load, view.ranks[0].pace, now=now)
        assert table.home("m", giant, now=now) == 0
    assert table.home("m", done, now=31.0) is None
    assert not explains_silence(view.ranks[0].load, view.ranks[0].pace, now=2 * seconds + 11.0)
    assert wait_seconds(view.ranks[0].load, view.ranks[0].pace, now=15.0) == pytest.approx(seconds - 15.0)
    chat = RouteRequest(model="m", prompt_tokens=2_000, output_tokens=100, reusable_tokens={0: 1_500})
    decision = Affinity(CostParameters())(view, chat, random.Random(0), 15.0)
    assert decision is not None
    assert decision.slot == 1

    book.close(claim, now=100.0)
    table.finish("m", giant, binding, now=100.0)
    assert table.home("m", giant, now=129.0) == 0
    assert table.home("m", giant, now=131.0) is None


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("giants", [1, 2, 4, 6, 8, 12, 24])
def test_no_number_of_giants_keeps_a_session_behind_them(ranks: int, giants: int) -> None:
    """75 s of queue a giant at home, and 100,000 of 100,800 tokens, which take 6.3 s elsewhere: sixteen such turns are
    lost by leaving. It waits for one giant, 75 s, and goes to an idle rank from two on, whatever comes more."""
    book = LoadBook()
    view = FleetView(tuple(rank(slot, book) for slot in range(ranks)))
    for _ in range(giants):
        book.open(0, prompt_tokens=GIANT_TOKENS, prefill_tokens=GIANT_TOKENS, seconds=75.0, now=0.0)
    turn = RouteRequest(
        model="m",
        prompt_tokens=100_800,
        output_tokens=200,
        reusable_tokens={0: 100_000},
        session=SessionKey("t", "s"),
        home=0,
    )
    decision = Affinity(CostParameters())(view, turn, random.Random(0), 0.0)
    assert decision is not None
    assert (decision.slot == 0) is (giants == 1)
    assert decision.reason is (Reason.HOME if giants == 1 else Reason.SPILL)


def outlive(is_dead: Callable[[RankView, int, float], bool]) -> tuple[float | None, list[int]]:
    """A giant prompt on one of three ranks, and on the next when that is taken for dead, which is probed each five
    seconds and silent until the prompt is computed. Returns when it is answered, and the ranks that were lost.
    """
    lost, now = [], 0.0
    for slot in range(3):
        book = LoadBook()
        busy = rank(slot, book)
        seconds = prefill_seconds(busy.pace, uncached_tokens=GIANT_TOKENS, context_tokens=GIANT_TOKENS)
        book.open(slot, prompt_tokens=GIANT_TOKENS, prefill_tokens=GIANT_TOKENS, seconds=seconds, now=now)
        missed, began = 0, now
        while now < began + seconds:
            now += 5.0
            missed += 1
            if now < began + seconds and is_dead(busy, missed, now):
                lost.append(slot)
                break
        else:
            return now, lost
    return None, lost


def test_who_counts_missed_probes_loses_the_whole_fleet_to_one_prompt() -> None:
    """Three missed probes are a death: the prompt is tried on the next rank, and kills that as well. Ours is answered
    after the 75 s that it takes, and no rank is lost.
    """

    def counting(busy: RankView, missed: int, now: float) -> bool:
        return missed >= 3

    def ours(busy: RankView, missed: int, now: float) -> bool:
        return missed >= 3 and not explains_silence(busy.load, busy.pace, now=now)

    assert outlive(counting) == (None, [0, 1, 2])
    assert outlive(ours) == (75.0, [])


def test_who_forgets_sessions_by_the_age_of_their_last_request_computes_a_giant_twice() -> None:
    """Thirty seconds of idleness end a session. Counted from when its last request came, the giant's is over before it
    is answered, and its next turn starts anew where it is quiet; ours goes home.
    """
    book, giant = LoadBook(), SessionKey("t", "giant")
    view = FleetView((rank(0, book), rank(1, book)))
    table, by_age = SessionTable(max_sessions=10, idle_seconds=30.0), {giant: (0, 0.0)}
    table.finish("m", giant, table.start("m", giant, slot=0, now=0.0), now=75.0)
    slot, came = by_age[giant]
    costs = []
    for home in (table.home("m", giant, now=80.0), slot if 80.0 - came <= 30.0 else None):
        turn = RouteRequest(
            model="m",
            prompt_tokens=GIANT_TOKENS + 500,
            output_tokens=100,
            reusable_tokens={} if home is None else {home: GIANT_TOKENS},
            session=giant,
            home=home,
        )
        decision = Affinity(CostParameters())(view, turn, random.Random(0), 80.0)
        assert decision is not None
        costs.append(decision.expected_prefill_seconds)

    assert costs[0] < 0.2
    assert costs[1] > 70.0


def test_clients_that_lose_patience_with_a_long_prefill_open_no_breaker() -> None:
    """Thirty clients leave; so many resets would have opened it six times over."""
    breakers = Breakers(BreakerParameters())
    for _ in range(30):
        breakers.sent(0, now=0.0)
        breakers.ended(0, Verdict.NEITHER, ranks=2, now=0.0)
    assert breakers.state(0, now=0.0) is BreakerState.CLOSED

    for _ in range(5):
        breakers.ended(0, Verdict.BAD, ranks=2, now=0.0)
    assert breakers.state(0, now=0.0) is BreakerState.OPEN
