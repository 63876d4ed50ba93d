"""Where sessions are at home, how long, and which are forgotten."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import NoReturn

import pytest

from router.core.session_table import SessionTable
from router.core.types import SessionKey


def key(number: int) -> SessionKey:
    return SessionKey("t", f"s{number}")


def serve(table: SessionTable, number: int, *, slot: int, now: float) -> None:
    """One request that begins and ends at once."""
    table.finish("m", key(number), table.start("m", key(number), slot=slot, now=now), now=now)


def test_a_session_is_at_home_where_it_was_served_last() -> None:
    """Per model: the same session of another model has another home."""
    table = SessionTable(max_sessions=10, idle_seconds=60)
    serve(table, 1, slot=3, now=0)

    assert table.home("m", key(1), now=1) == 3
    assert table.home("other", key(1), now=1) is None
    serve(table, 1, slot=5, now=2)
    assert table.home("m", key(1), now=3) == 5


def test_the_least_recently_used_session_goes_first() -> None:
    """Use counts from a request's end: a long one keeps its session young."""
    table = SessionTable(max_sessions=3, idle_seconds=1000)
    long = table.start("m", key(0), slot=0, now=0)
    serve(table, 1, slot=0, now=1)
    serve(table, 2, slot=0, now=2)
    table.finish("m", key(0), long, now=3)
    serve(table, 3, slot=0, now=4)

    assert [number for number in range(4) if table.home("m", key(number), now=5) is not None] == [0, 2, 3]
    assert len(table) == 3


def test_what_another_router_used_last_is_no_older_than_what_this_one_did() -> None:
    """Its sessions are listed and forgotten in the order of their use, wherever that was."""
    table = SessionTable(max_sessions=3, idle_seconds=1000)
    for number in range(3):
        serve(table, number, slot=0, now=number)
    table.adopt("m", key(0), slot=1, used_at=3, now=4, is_own=False)
    assert [named for (_, named), _ in table.recent()] == [key(0), key(2), key(1)]
    serve(table, 3, slot=0, now=5)

    assert [number for number in range(4) if table.home("m", key(number), now=5) is not None] == [0, 2, 3]


def test_a_running_session_is_never_pushed_out() -> None:
    """However many others come, and the table keeps its bound by pushing out idle ones."""
    table = SessionTable(max_sessions=3, idle_seconds=1000)
    table.start("m", key(0), slot=7, now=0)
    for number in range(1, 50):
        serve(table, number, slot=0, now=number)

    assert table.home("m", key(0), now=50) == 7
    assert len(table) == 3


def test_idleness_ends_a_home_but_not_before_its_request() -> None:
    """Idle seconds count from the end of the last request that runs."""
    table = SessionTable(max_sessions=10, idle_seconds=60)
    first = table.start("m", key(1), slot=2, now=0)
    second = table.start("m", key(1), slot=2, now=1)
    table.finish("m", key(1), first, now=2)
    serve(table, 2, slot=0, now=4999)
    assert table.home("m", key(1), now=5000) == 2

    table.finish("m", key(1), second, now=5000)
    assert table.home("m", key(1), now=5060) == 2
    assert table.home("m", key(1), now=5061) is None


def test_expired_sessions_make_room_before_the_table_is_full() -> None:
    """The table forgets the idle when somebody new comes."""
    table = SessionTable(max_sessions=100, idle_seconds=60)
    for number in range(5):
        serve(table, number, slot=0, now=number)
    serve(table, 9, slot=0, now=62.5)

    assert [entry[0][1].session for entry in table.recent()] == ["s9", "s4", "s3"]


def test_a_session_is_at_home_where_most_of_the_prompt_is() -> None:
    """A title asked for elsewhere moves no conversation; of equals the last one counts, and an empty rank least."""
    table = SessionTable(max_sessions=10, idle_seconds=60)
    serve(table, 1, slot=3, now=0)
    serve(table, 1, slot=5, now=1)

    assert table.home("m", key(1), now=2, held={3: 60_000, 5: 16, 7: 90_000}) == 3
    assert table.home("m", key(1), now=2, held={3: 16, 5: 208}) == 5
    assert table.home("m", key(1), now=2, held={3: 16, 5: 16}) == 5
    table.forget_slot(5)
    assert table.home("m", key(1), now=2) == 3


def test_so_many_homes_are_remembered() -> None:
    """The one that served longest ago goes; coming back to one does not count it twice."""
    table = SessionTable(max_sessions=10, idle_seconds=60)
    for slot in (0, 1, 2, 1, 3, 4, 5, 6, 7, 8):
        serve(table, 1, slot=slot, now=0)

    assert [slot for slot in range(9) if table.home("m", key(1), now=1, held={slot: 1}) == slot] == list(range(1, 9))


def test_a_session_begins_until_it_is_answered() -> None:
    """With a request on its way and none that has ended, however many there are."""
    table = SessionTable(max_sessions=10, idle_seconds=60)
    assert not table.is_beginning("m", key(1))
    first = table.start("m", key(1), slot=0, now=0)
    second = table.start("m", key(1), slot=0, now=0)
    assert table.is_beginning("m", key(1))
    table.finish("m", key(1), first, now=1)
    assert not table.is_beginning("m", key(1))
    table.finish("m", key(1), second, now=2)
    table.start("m", key(1), slot=0, now=3)
    assert not table.is_beginning("m", key(1))


def test_a_rank_that_leaves_is_nobodys_home() -> None:
    """The end of a request on it says nothing of the session's next home, whose own request still runs."""
    table = SessionTable(max_sessions=10, idle_seconds=60)
    old = table.start("m", key(1), slot=2, now=0)
    serve(table, 2, slot=3, now=0)
    table.forget_slot(2)
    assert table.home("m", key(1), now=1) is None
    assert table.home("m", key(2), now=1) == 3

    table.start("m", key(1), slot=4, now=1)
    table.finish("m", key(1), old, now=2)
    assert table.home("m", key(1), now=5000) == 4


class Sealed(OrderedDict[object, object]):
    """What nobody may go through."""

    def __iter__(self) -> NoReturn:
        raise AssertionError("went through all sessions")

    items = keys = values = __iter__


def test_a_rank_leaves_without_a_walk_through_all_sessions() -> None:
    """There may be 200,000, and requests wait meanwhile."""
    table = SessionTable(max_sessions=10, idle_seconds=60)
    serve(table, 1, slot=2, now=0)
    table._bindings = Sealed(table._bindings)  # type: ignore[assignment]
    table.forget_slot(2)

    assert table.home("m", key(1), now=1) is None


def test_the_next_rank_of_a_slot_inherits_no_sessions() -> None:
    """Nor is a session listed whose rank has gone, and when it comes again it begins."""
    table = SessionTable(max_sessions=10, idle_seconds=60)
    serve(table, 1, slot=2, now=0)
    serve(table, 2, slot=3, now=0)
    table.forget_slot(2)
    serve(table, 3, slot=2, now=1)

    assert [table.home("m", key(number), now=2) for number in (1, 2, 3)] == [None, 3, 2]
    assert [entry[0][1].session for entry in table.recent()] == ["s3", "s2"]
    table.start("m", key(1), slot=3, now=2)
    assert table.is_beginning("m", key(1))


def test_sessions_without_a_rank_keep_the_tables_bound() -> None:
    """They are pushed out in their turn like all others."""
    table = SessionTable(max_sessions=3, idle_seconds=1000)
    for number in range(20):
        serve(table, number, slot=number, now=number)
        table.forget_slot(number)

    assert len(table) == 3
    assert not list(table.recent())


@pytest.mark.parametrize("seed", range(5))
def test_homes_are_those_of_lists_that_are_searched(seed: int) -> None:
    """Ranks that come, serve, are told of by other routers and leave, against a list of slots for each session."""
    rng = random.Random(seed)
    table = SessionTable(max_sessions=1000, idle_seconds=1e9)
    expected: dict[int, list[int]] = {}
    for now in range(600):
        number, slot = rng.randrange(8), rng.randrange(12)
        if rng.random() < 0.15:
            table.forget_slot(slot)
            for slots in expected.values():
                slots[:] = [other for other in slots if other != slot]
        else:
            if rng.random() < 0.7:
                serve(table, number, slot=slot, now=now)
            else:
                table.adopt("m", key(number), slot=slot, used_at=now, now=now, is_own=False)
            others = [other for other in expected.get(number, []) if other != slot]
            expected[number] = [slot, *others[:7]]
        for number, slots in expected.items():
            held = {slot: rng.randrange(3) for slot in range(12)}
            best = max(slots, key=lambda slot: held[slot], default=None)
            assert table.home("m", key(number), now=now, held=held) == best
