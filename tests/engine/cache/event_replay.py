"""A consumer of cache events that believes nothing: what a careful router would keep of them."""

from __future__ import annotations

from collections.abc import Iterable

from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event


class Replay:
    """Resident hashes for each group. Raises ``AssertionError`` on an event that cannot be true."""

    def __init__(self, groups: int) -> None:
        self.resident: list[set[int]] = [set() for _ in range(groups)]

    def apply(self, events: Iterable[Event]) -> None:
        """Follow the events in order."""
        for event in events:
            match event:
                case BlockStored():
                    self._store(event)
                case BlockRemoved():
                    gone = {_number(value) for value in event.hashes}
                    assert len(gone) == len(event.hashes)
                    assert gone <= self.resident[event.group], "removed what was not stored"
                    self.resident[event.group] -= gone
                case AllBlocksCleared():
                    self.resident = [set() for _ in self.resident]
                case _:
                    raise AssertionError(event)

    def _store(self, event: BlockStored) -> None:
        namespace = event.extra_keys[0][0] if event.extra_keys else ""
        if event.extra_keys is not None:
            assert event.parent is None
            assert event.extra_keys == ((namespace,), *[None] * (len(event.hashes) - 1))
        parent = namespace_seed(namespace) if event.parent is None else _number(event.parent)
        expected = block_keys(event.token_ids, block_tokens=event.block_tokens, parent=parent)
        assert list(event.hashes) == expected, "not dense, or not this parent's child"
        if event.group == 0 and event.parent is not None:
            assert parent in self.resident[0], "stored before its parent"
        assert not self.resident[event.group] & set(expected), "stored twice"
        assert len(set(expected)) == len(expected)
        self.resident[event.group].update(expected)


def _number(value: int | bytes) -> int:
    assert isinstance(value, int)
    return value
