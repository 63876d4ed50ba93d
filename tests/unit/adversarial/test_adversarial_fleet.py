"""Traffic that breaks naive routing, in simulated time: each case's signature, and who shows it.

``affinity`` is Homing's price with admission. The comparators are other routers' rules; a case that they pass as well
would prove nothing, so each test shows one that fails it.
"""

from __future__ import annotations

import random
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from loadtest.simulate.measure import PolicyResult
from loadtest.simulate.run import simulate
from loadtest.simulate.runs import Run
from loadtest.simulate.scenario import Scenario
from loadtest.simulate.workload import Recording, load_recording
from tests.fakes.fleet_script import FleetScript, Served, computed, hit_rate, imbalance, prompt, tagged, ttft
from tests.unit.simulate.test_simulate import write_sessions

# --- 1: one tenant has half of the sessions, all with one head ----------------------------------------


@cache
def hot_tenant(policy: str) -> list[Served]:
    """64 sessions of twelve turns begin within a minute; every other one has the same 30,000 tokens before its own."""
    script, rng, head = FleetScript(policy, seconds=600.0, slowdown=3.0), random.Random(3), Run()
    for number in range(64):
        own, is_hot = Run(), number % 2 == 0
        sizes = [(2_000 if is_hot else 12_000) + 10 * number + 800 * turn for turn in range(12)]
        turns = [prompt((head, 30_000 * is_hot), (own, size)) for size in sizes]
        script.converse(rng.uniform(0, 60), "hot" if is_hot else "other", turns, session=f"s{number}", gap_seconds=5.0)
    return script.run()


def test_a_hot_head_does_not_pile_up_on_one_rank() -> None:
    """Prefix routing sends the tenant's every turn to the rank that had its first one; ours costs nobody anything."""
    ours, prefix = hot_tenant("affinity"), hot_tenant("longest_prefix")

    assert len(ours) == len(prefix) == 64 * 12
    assert {one.slot for one in tagged(prefix, "hot")} == {tagged(prefix, "hot")[0].slot}
    assert imbalance(prefix) > 2.5
    assert imbalance(ours) < 1.5
    assert max(Counter(one.slot for one in tagged(ours, "hot")).values()) < 0.5 * 32 * 12
    assert ttft(tagged(ours, "hot"), 0.9) < 0.5 * ttft(tagged(prefix, "hot"), 0.9)
    assert hit_rate(ours) > hit_rate(prefix) - 0.015


# --- 2: many subagents at once, with one head that is nowhere -----------------------------------------


@cache
def subagents(policy: str, parents: int) -> list[Served]:
    """Parents of 60,000 tokens; at 60 s each spawns ten children in 100 ms; a minute later the parents go on."""
    script, rng, head = FleetScript(policy, seconds=200.0, pool_tokens=600_000), random.Random(3), Run()
    for parent in range(parents):
        own, name = Run(), f"s{parent}"
        script.ask(rng.uniform(0, 20), "parent", prompt((own, 60_000)), session=name)
        script.ask(rng.uniform(120, 125), "back", prompt((own, 60_500)), session=name)
        for child in range(10):
            path = prompt((head, 10_000), (Run(), 500))
            script.ask(60 + rng.uniform(0, 0.1), "child", path, session=name, agent=f"a{child}")
    return script.run()


def heads(served: list[Served]) -> int:
    """How many times the children's common head was computed."""
    return sum(one.computed_tokens > 5_000 for one in tagged(served, "child"))


def test_a_few_siblings_cost_a_prefill_or_two() -> None:
    """Ten children by load alone compute their head on every rank; ours wait half a second for the first."""
    ours, loads = subagents("affinity", 1), subagents("least_loaded", 1)

    assert heads(loads) == 8
    assert heads(ours) <= 2
    assert ttft(tagged(ours, "child"), 1.0) < 1.3 * ttft(tagged(loads, "child"), 1.0)


def test_a_herd_of_subagents_spreads_and_leaves_the_parents_their_blocks() -> None:
    """320 children of 32 parents: prefix routing queues all behind one prefill, load routing loses the parents."""
    ours, prefix, loads = (subagents(policy, 32) for policy in ("affinity", "longest_prefix", "least_loaded"))
    children, back = tagged(ours, "child"), tagged(ours, "back")

    assert len({one.slot for one in tagged(prefix, "child")}) == 1
    assert ttft(tagged(prefix, "child"), 0.9) > 10.0
    assert ttft(children, 0.9) < 2.0
    assert max(Counter(one.slot for one in children).values()) < 1.25 * 320 / 8
    assert heads(ours) <= 8
    assert hit_rate(tagged(loads, "back")) < 0.2
    assert hit_rate(back) > 0.98


# --- 3: sessions stop, others fill the pools, and they return -----------------------------------------


@cache
def idle_and_return(policy: str, minutes: int, others: int) -> list[Served]:
    """64 sessions of 150,000 tokens stop for minutes, while others of 100,000 come once; then all return at once."""
    back = 600.0 + 60.0 * minutes
    script, rng = FleetScript(policy, seconds=back + 400.0), random.Random(5)
    for number in range(64):
        own, name = Run(), f"s{number}"
        script.ask(rng.uniform(0, 400), f"first {number}", prompt((own, 150_000)), session=name)
        script.ask(back + rng.uniform(0, 60), f"back {number}", prompt((own, 151_000)), session=name)
    for number in range(others):
        script.ask(rng.uniform(600, back - 30), "other", prompt((Run(), 100_000)), session=f"other {number}")
    return script.run()


def stayed(served: list[Served]) -> float:
    """Share of the sessions that returned to the rank they had left."""
    before = {one.tag.split()[1]: one.slot for one in tagged(served, "first")}
    back = tagged(served, "back")
    return sum(before[one.tag.split()[1]] == one.slot for one in back) / len(back)


def test_who_returns_to_a_warm_cache_returns_home() -> None:
    """Five minutes in which nobody else came: all 64 find nearly all of their tokens. By load they find nothing."""
    ours, loads = idle_and_return("affinity", 5, 0), idle_and_return("least_loaded", 5, 0)

    assert stayed(ours) == 1.0
    assert hit_rate(tagged(ours, "back")) > 0.98
    assert hit_rate(tagged(loads, "back")) < 0.3


@pytest.mark.parametrize(("minutes", "others"), [(5, 150), (20, 300), (60, 400)])
def test_who_returns_to_a_cache_that_forgot_goes_where_it_is_quiet(minutes: int, others: int) -> None:
    """A sticky router sends all to ranks that hold nothing of theirs, however long the queues are there."""
    ours, sticky = idle_and_return("affinity", minutes, others), idle_and_return("sticky", minutes, others)
    back, stuck = tagged(ours, "back"), tagged(sticky, "back")

    assert len(back) == len(stuck) == 64
    assert stayed(sticky) == 1.0
    assert hit_rate(stuck) < 0.1
    assert stayed(ours) < 0.3
    assert imbalance(back) < 1.2 < imbalance(stuck)
    assert ttft(back, 1.0) < 0.75 * ttft(stuck, 1.0)


# --- 4: many sessions compact at once -----------------------------------------------------------------


@cache
def compaction(policy: str) -> list[Served]:
    """Giants keep six of eight ranks busy while 32 sessions begin on the other two; then every third one compacts.

    12,000 tokens are everybody's head. Contexts grow from 30,000 tokens by 2,000 a turn; compacted ones from 20,000.
    """
    script, rng, head = FleetScript(policy, seconds=600.0, slowdown=4.0), random.Random(7), Run()
    for number in range(6):
        path = prompt((head, 12_000), (Run(), 400_000))
        script.ask(0.01 * number, "giant", path, session=f"giant {number}", output_tokens=2)
    for number in range(32):
        own, short, first = Run(), Run(), rng.uniform(2, 12)
        for turn in range(40):
            at = first + (10.0 * (turn + 19) if turn else 0.0)
            if number % 3 == 0 and turn > 10:
                path, tag = prompt((head, 12_000), (short, 8_000 + 2_000 * (turn - 11))), "compacted"
            else:
                path, tag = prompt((head, 12_000), (own, 18_000 + 2_000 * turn)), "grown"
            script.ask(at, f"{tag} {number} {turn}", path, session=f"s{number}")
    return script.run()


def homes(served: list[Served], turn: int) -> dict[str, int]:
    """Where each session's turn went."""
    return {one.tag.split()[1]: one.slot for one in served if one.tag.endswith(f" {turn}")}


def test_a_wave_of_compactions_is_the_moment_to_rebalance() -> None:
    """What a compacted session has left at home, everybody holds: it leaves the crowded ranks; the warm stay."""
    ours, sticky = compaction("affinity"), compaction("sticky")

    assert len(set(homes(ours, 10).values())) == 2
    for served, moves in ((ours, True), (sticky, False)):
        before, after = homes(served, 10), homes(served, 38)
        compacted = {one.tag.split()[1] for one in tagged(served, "compacted")}
        moved = {name for name in before if before[name] != after[name]}
        assert len(compacted) == 11
        assert (len(moved & compacted) >= 9) is moves
        assert len(moved - compacted) <= 1
    late, stuck = ([one for one in served if one.at > 450] for served in (ours, sticky))
    assert len({homes(ours, 38)[name] for name in map(str, range(0, 32, 3))}) >= 5
    assert ttft(late, 0.9) < 0.6 * ttft(stuck, 0.9)


# --- 5: one of eight ranks dies, and is back cold -----------------------------------------------------

_FAILS, _BACK = 300.0, 420.0


@cache
def dead_rank(policy: str) -> list[Served]:
    """64 sessions ask every twelve seconds for ten minutes; sixteen more begin when the rank is back.

    5,000 tokens are everybody's head; contexts grow from 20,000 tokens.
    """
    script = FleetScript(policy, seconds=720.0, fail_at_seconds=_FAILS, outage_seconds=_BACK - _FAILS)
    rng, head = random.Random(11), Run()
    for number in range(80):
        own, is_new = Run(), number >= 64
        first = rng.uniform(_BACK + 5, _BACK + 60) if is_new else rng.uniform(0, 12)
        for turn in range(20 if is_new else 50):
            path = prompt((head, 5_000), (own, 15_000 + 600 * turn))
            script.ask(first + 12 * turn, f"{'new' if is_new else 'old'} {number} {turn}", path, session=f"s{number}")
    return script.run()


def between(served: list[Served], begin: float, end: float) -> list[Served]:
    return [one for one in served if begin <= one.at < end]


def last_homes(served: list[Served]) -> dict[str, int]:
    return {one.tag.split()[1]: one.slot for one in sorted(served, key=lambda one: one.at)}


def test_a_dead_rank_costs_its_own_sessions_one_prefill() -> None:
    """Nothing is lost, nobody else moves, and 30 s later hits are what they were. By load seven of eight move."""
    ours, loads = dead_rank("affinity"), dead_rank("least_loaded")
    before, after = last_homes(between(ours, 0, _FAILS)), last_homes(between(ours, _FAILS, _BACK))
    victims = {name for name, slot in before.items() if slot == 0}
    moved = {name for name in after if before[name] != after[name]}

    assert len({one.tag for one in ours}) == 64 * 50 + 16 * 20
    assert not [one for one in between(ours, _FAILS + 0.01, _BACK) if one.slot == 0]
    assert 4 <= len(victims) <= 12
    assert victims <= moved
    assert len(moved - victims) <= 2
    again = computed(between(ours, _FAILS, _BACK)) - computed(between(ours, _FAILS - (_BACK - _FAILS), _FAILS))
    assert again < 1.2 * len(victims) * (20_000 + 25 * 600)
    assert hit_rate(between(ours, _FAILS + 30, _BACK)) > 0.95 * hit_rate(between(ours, 100, _FAILS))

    before, after = last_homes(between(loads, 0, _FAILS)), last_homes(between(loads, _FAILS, _BACK))
    assert sum(before[name] != after[name] for name in after) > 0.6 * 64
    assert hit_rate(between(loads, _FAILS + 30, _BACK)) < 0.9


def test_a_rank_that_is_back_cold_is_used_again_without_a_stampede() -> None:
    """New sessions go there though the head is elsewhere; the old ones stay. By prefix it is never used again."""
    ours, prefix = dead_rank("affinity"), dead_rank("longest_prefix")

    new, old = (last_homes(tagged(ours, kind)) for kind in ("new", "old"))
    assert 4 <= sum(slot == 0 for slot in new.values()) <= 10  # ten sessions a rank are even
    assert sum(slot == 0 for slot in old.values()) <= 3
    assert ttft([one for one in tagged(ours, "new") if one.tag.endswith(" 0")], 1.0) < 3.0
    assert not [one for one in between(prefix, _BACK, 720) if one.slot == 0]


# --- 6: more and more conversations over the same pools -----------------------------------------------


@cache
def cliff(folder: Path, policy: str, lanes: int) -> PolicyResult:
    recording = _recording(folder)
    scenario = Scenario(
        ranks=4, lanes=lanes, pool_tokens=110_000, slowdown=15.0, warm_up_seconds=300.0, window_seconds=900.0
    )
    return simulate(recording, scenario, policy)


@cache
def _recording(folder: Path) -> Recording:
    return load_recording(write_sessions(folder / "sessions.jsonl"))


def test_throughput_does_not_fall_off_the_cliff(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Four pools hold the contexts of fifteen lanes. With twice and four times as many, a router that admits all
    computes nearly everything again, and serves half the turns of fifteen; ours keeps four fifths at least."""
    folder = tmp_path_factory.mktemp("cliff")
    ours, sticky = ([cliff(folder, policy, lanes) for lanes in (8, 15, 30, 60)] for policy in ("affinity", "sticky"))

    assert sticky[1].hit_rate > 0.7
    assert max(one.hit_rate for one in sticky[2:]) < 0.3
    assert max(one.turns_per_second for one in sticky[2:]) < 0.6 * sticky[1].turns_per_second
    assert min(one.hit_rate for one in ours) > 0.75
    assert min(one.turns_per_second for one in ours[2:]) > 0.8 * ours[1].turns_per_second
    assert ours[3].turns_per_second > 2.0 * sticky[3].turns_per_second


# --- 8: session ids that lie --------------------------------------------------------------------------


@cache
def lies(policy: str, kind: str) -> list[Served]:
    """48 conversations of ten turns, under their own ids, none, an id for each request, or one id for all."""
    script, rng = FleetScript(policy, seconds=200.0), random.Random(5)
    for number in range(48):
        own, first = Run(), rng.uniform(0, 30)
        for turn in range(10):
            session = {"own": f"s{number}", "none": None, "each": f"{number} {turn}", "one": "same"}[kind]
            script.ask(first + 8 * turn, f"{number} {turn}", prompt((own, 20_000 + 1_000 * turn)), session=session)
    return script.run()


@pytest.mark.parametrize("kind", ["none", "each", "one"])
def test_ids_that_lie_cost_nearly_nothing(kind: str) -> None:
    """Prefixes speak for themselves where ids do not; one id for all piles nobody up. A router by ids loses all."""
    honest, ours, sticky = lies("affinity", "own"), lies("affinity", kind), lies("sticky", kind)

    assert hit_rate(ours) > hit_rate(honest) - 0.02
    assert imbalance(ours) < 1.6
    if kind == "one":
        assert imbalance(sticky) == pytest.approx(8.0)
    else:
        assert hit_rate(sticky) < 0.5


# --- 9: a prefill so long that it looks like a death ---------------------------------------------------


@cache
def slow_prefill(policy: str) -> list[Served]:
    """Sixteen chats on two ranks, and at 20 s a prompt of 600,000 tokens, of a minute and more; later its next turn."""
    script, rng, giant = FleetScript(policy, seconds=400.0, ranks=2), random.Random(7), Run()
    for number in range(16):
        own = Run()
        turns = [prompt((own, 1_500 + 300 * turn)) for turn in range(40)]
        script.converse(rng.uniform(0, 5), "chat", turns, session=f"s{number}", gap_seconds=2.0)
    script.ask(20.0, "giant", prompt((giant, 600_000)), session="giant")
    script.ask(300.0, "giant again", prompt((giant, 600_500)), session="giant")
    return script.run()


def test_nobody_waits_for_a_giant_who_need_not() -> None:
    """Who counts requests sends chats home to wait for a minute behind it; ours go round the rank, which keeps the
    giant: it is computed once, and its next turn finds it there."""
    ours, counting = slow_prefill("affinity"), slow_prefill("smg")
    giant, again = tagged(ours, "giant")

    assert giant.ttft_seconds > 60.0
    assert (giant.cached_tokens, again.slot) == (0, giant.slot)
    assert again.cached_tokens > 599_000
    assert ttft(tagged(counting, "chat"), 1.0) > 50.0
    assert ttft(tagged(ours, "chat"), 1.0) < 2.0


# --- 12: nothing is ever asked twice ------------------------------------------------------------------


@cache
def unique(policy: str) -> list[Served]:
    """Some 2,400 prompts of their own in five minutes, lognormal around 6,600 tokens, at half of what ranks can do."""
    script, rng, at = FleetScript(policy, seconds=400.0, pool_tokens=1_000_000), random.Random(5), 0.0
    while at < 300.0:
        at += rng.expovariate(8.0)
        path = prompt((Run(), int(rng.lognormvariate(8.8, 0.8))))
        script.ask(at, "unique", path, session=f"{at}", output_tokens=1 + int(rng.lognormvariate(5.0, 0.7)))
    return script.run()


def test_affinity_costs_nothing_where_there_is_nothing_to_gain() -> None:
    """Within a twentieth of going by load alone, as a mean and in the tail. Hashing costs a third more."""
    ours, loads, hashed = unique("affinity"), unique("least_loaded"), unique("session_hash")

    def mean(served: list[Served]) -> float:
        return sum(one.ttft_seconds for one in served) / len(served)

    assert len(ours) == len(loads) == len(hashed)
    assert mean(ours) < 1.05 * mean(loads)
    assert ttft(ours, 0.99) < 1.1 * ttft(loads, 0.99)
    assert imbalance(ours) < 1.05
    assert mean(hashed) > 1.3 * mean(loads)


# --- 13: giants among chats ---------------------------------------------------------------------------


@cache
def giants(policy: str) -> list[Served]:
    """Two conversations a second begin for ten minutes, four turns each: one in a hundred is of 500,000 tokens."""
    script, rng, at, number = FleetScript(policy, seconds=900.0), random.Random(5), 0.0, 0
    while at < 600.0:
        at += rng.expovariate(2.0)
        number += 1
        own, is_giant = Run(), rng.random() < 0.01
        size, grows = (500_000, 1_000) if is_giant else (10_000, 600)
        turns = [prompt((own, size + grows * turn)) for turn in range(4)]
        script.converse(at, "giant" if is_giant else "chat", turns, session=f"s{number}", gap_seconds=10.0)
    return script.run()


def test_chats_do_not_queue_behind_giants() -> None:
    """A giant keeps its rank busy for a minute. Who goes home whatever it costs waits as long; ours go around it."""
    ours, sticky = giants("affinity"), giants("sticky")

    assert len(ours) == len(sticky) > 4_000
    assert ttft(tagged(sticky, "chat"), 0.99) > 30.0
    assert ttft(tagged(ours, "chat"), 0.99) < 2.0
    assert hit_rate(tagged(ours, "giant")) > hit_rate(tagged(sticky, "giant")) - 0.01
    assert ttft(tagged(ours, "giant"), 1.0) < 1.1 * ttft(tagged(sticky, "giant"), 1.0)
