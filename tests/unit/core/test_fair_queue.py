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


def test_a_loud_tenant_does_not_starve_others() -> None:
    """Behind a hundred requests of one tenant another's only request is second, not the hundred and first."""
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.add(f"loud {number}", tenant="loud", priority=Priority.NORMAL)
    queue.add("quiet", tenant="quiet", priority=Priority.NORMAL)
    assert [queue.pop(), queue.pop()] == ["loud 0", "quiet"]
