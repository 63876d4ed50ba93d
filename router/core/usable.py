"""From what is resident to what can be reused: the rules of each attention kind, as functions.

- Full attention: all blocks from the start.
- Sliding window W: also the last ceil((W-1)/block) blocks before the boundary; a run that reaches back to block 0
  counts however short.
- Recurrent state: a checkpoint at the very boundary, which is a window of one block.
- Several groups: the largest boundary all of them agree to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

#: Slot bits of one block, by its key.
Mask = Callable[[int], int]


def slots_of(mask: int) -> Iterator[int]:
    """The slots whose bits are set, lowest first."""
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low


def depths(keys: Sequence[int], mask: Mask, *, limit: int) -> dict[int, int]:
    """How many blocks from the start each slot holds, up to ``limit``; slots that hold none are left out.

    What a slot holds must be downward closed, so each change is found by bisection.
    """
    found: dict[int, int] = {}
    if limit <= 0:
        return found
    alive = mask(keys[0])
    start = 0
    while alive:
        # All of `alive` hold block `start`; find the first block that one of them lacks.
        low, high = start, limit
        while high - low > 1:
            middle = (low + high) // 2
            if mask(keys[middle]) & alive == alive:
                low = middle
            else:
                high = middle
        remaining = 0 if high == limit else mask(keys[high]) & alive
        for slot in slots_of(alive & ~remaining):
            found[slot] = high
        alive, start = remaining, high
    return found


def boundary(
    keys: Sequence[int], depth: int, *, bit: int, groups: Mapping[int, Mask], needed: Mapping[int, int]
) -> int:
    """The largest boundary at or below ``depth`` that every sparse group accepts (a fixed point).

    ``groups[g]`` gives the slot bits of a block in group g, ``needed[g]`` how many blocks before the boundary it
    must hold.
    """
    agreed = -1
    while depth != agreed:
        agreed = depth
        for group, mask in groups.items():
            depth = _run_boundary(keys, depth, bit=bit, mask=mask, needed=needed[group])
    return depth


def _run_boundary(keys: Sequence[int], depth: int, *, bit: int, mask: Mask, needed: int) -> int:
    """Scan down from ``depth`` for ``needed`` resident blocks in a row, or a run that reaches block 0."""
    end = depth
    block = depth - 1
    while block >= 0 and end - 1 - block < needed:
        if not mask(keys[block]) & bit:
            end = block
        block -= 1
    return end
