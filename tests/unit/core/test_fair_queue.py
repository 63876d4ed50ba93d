"""The fair queue against a list that is searched by the words of its rule."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.core.fair_queue import FairQueue, Priority

EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc"), st.sampled_from(list(Priority))),
        st.tuples(st.just("pop"), st.just(""), st.just(Priority.LOW)),
        st.tuples(st.just("remove"), st.just(""), st.just(Priority.LOW)),
    ),
    max_size=60,
)


@given(EVENTS, st.randoms(use_true_random=False))
def test_order(events: list[tuple[str, str, Priority]], rng: object) -> None:
    """Most urgent first; then the tenant that has stood in line longest since it came or was served; then in order."""
    queue: FairQueue[int] = FairQueue()
    waiting: list[tuple[Priority, str, int, int]] = []  # priority, tenant, item, ticket
    stands: dict[tuple[Priority, str], int] = {}  # since when the tenant stands where it stands
    for clock, (event, tenant, priority) in enumerate(events):
        if event == "add":
            stands.setdefault((priority, tenant), clock)
            waiting.append((priority, tenant, clock, queue.add(clock, tenant=tenant, priority=priority)))
        elif event == "pop":
            expected = min(waiting, key=lambda entry: (entry[0], stands[entry[:2]], entry[2]), default=None)
            assert queue.pop() == (expected[2] if expected else None)
            if expected:
                waiting.remove(expected)
                del stands[expected[:2]]
                if any(entry[:2] == expected[:2] for entry in waiting):
                    stands[expected[:2]] = clock
        elif waiting:
            gone = rng.choice(waiting)  # type: ignore[attr-defined]
            queue.remove(gone[3])
            queue.remove(gone[3])
            waiting.remove(gone)
            if not any(entry[:2] == gone[:2] for entry in waiting):
                del stands[gone[:2]]
        assert len(queue) == len(waiting)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from(list(Priority))), max_size=20), st.data())
def test_who_gives_way(waiting: list[tuple[str, Priority]], data: st.DataObject) -> None:
    """The last of the least urgent, of the tenant with most of them, if it is less urgent or two ahead."""
    queue: FairQueue[int] = FairQueue()
    for item, (tenant, priority) in enumerate(waiting):
        queue.add(item, tenant=tenant, priority=priority)
    tenant, priority = data.draw(st.sampled_from("abc")), data.draw(st.sampled_from(list(Priority)))
    gone = queue.give_way(tenant=tenant, priority=priority)
    lowest = max((urgency for _, urgency in waiting), default=None)
    line = [name for name, urgency in waiting if urgency == lowest]
    if lowest is None or lowest < priority or (lowest == priority and _most(line) < line.count(tenant) + 2):
        assert gone is None
        assert len(queue) == len(waiting)
    else:
        assert gone is not None
        assert len(queue) == len(waiting) - 1
        name, urgency = waiting[gone]
        assert urgency == lowest
        assert line.count(name) == _most(line)
        assert gone == max(item for item, entry in enumerate(waiting) if entry == (name, urgency))


def _most(line: list[str]) -> int:
    return max(map(line.count, line), default=0)


def test_a_loud_tenant_does_not_starve_others() -> None:
    """Behind a hundred requests of one tenant another's only request is second, not the hundred and first."""
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.add(f"loud {number}", tenant="loud", priority=Priority.NORMAL)
    queue.add("quiet", tenant="quiet", priority=Priority.NORMAL)
    assert [queue.pop(), queue.pop()] == ["loud 0", "quiet"]
