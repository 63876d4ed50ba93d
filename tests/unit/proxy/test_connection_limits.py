"""How many connections may be held: the count against a plain list of who is there."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.proxy.limits import ConnectionLimits

STEPS = st.lists(st.tuples(st.booleans(), st.sampled_from("abc")), max_size=60)


@given(STEPS, st.integers(0, 4), st.integers(0, 3))
def test_neither_limit_is_ever_exceeded_nor_a_place_lost(
    steps: list[tuple[bool, str]], total: int, per_address: int
) -> None:
    """Whoever comes is let in exactly while there is room in all and for its address."""
    limits = ConnectionLimits(total=total, per_address=per_address)
    present: list[str] = []
    for comes, address in steps:
        if comes:
            has_room = (not total or len(present) < total) and (not per_address or present.count(address) < per_address)
            refusal = limits.admit(address)
            assert (refusal is None) == has_room
            if refusal is None:
                present.append(address)
            else:
                assert refusal.code == "too_many_connections"
                assert refusal.status == (503 if total and len(present) >= total else 429)
        elif address in present:
            present.remove(address)
            limits.release(address)
