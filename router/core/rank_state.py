"""What the index keeps for one rank besides its bits, and how it reads one dense event."""

from __future__ import annotations

from dataclasses import dataclass, field

from router.core.forecast import Pool
from router.core.usable import Geometry, Rule
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockStored, EngineHash

#: Parents that stored blocks wait for, per rank. Beyond it the oldest wait is given up.
MAX_ORPHANS = 4096
#: Names of sparse blocks that wait for their dense event, per rank.
MAX_UNNAMED = 65536


@dataclass(slots=True)
class RankState:
    """What the index keeps for one slot besides its bits. ``rules`` are of all groups but the dense one.

    ``align`` is the least common multiple of all strides: every hit ends there. ``keeps_all`` says of a window group
    whether it keeps every block (True) or only what lies before a prompt's end.
    """

    bit: int
    names: dict[EngineHash, int]
    geometry: Geometry
    pool: Pool | None = None
    blocks: int = 0
    applied_blocks: int = 0
    dense_group: int | None = None
    stride: int = 1
    align: int = 1
    rules: dict[int, Rule] = field(default_factory=dict)
    keeps_all: dict[int, bool] = field(default_factory=dict)
    orphans: dict[EngineHash, list[BlockStored]] = field(default_factory=dict)
    unnamed: dict[EngineHash, list[int]] = field(default_factory=dict)


def bound(waiting: dict[EngineHash, list[BlockStored]] | dict[EngineHash, list[int]], limit: int) -> None:
    if len(waiting) > limit:
        waiting.pop(next(iter(waiting)))


def keys_of_event(event: BlockStored, parent: int | None, *, unit_tokens: int) -> list[int]:
    """Chain keys of a dense event's blocks. Adapter and salt root the chain; other extra keys enter at their block."""
    extra = event.extra_keys or ()
    if event.lora_name:  # vLLM names the adapter in each block's extra keys, too
        extra = tuple([key for key in keys or () if key != event.lora_name] for keys in extra)
    if parent is None:
        salt = event.cache_salt or "\x00".join(map(str, extra[0] or () if extra else ()))
        parent = namespace_seed(event.lora_name or "", salt)
        extra = extra[1:] and (None, *extra[1:])
    stride = event.block_tokens // unit_tokens
    if not any(extra):
        return block_keys(event.token_ids, block_tokens=unit_tokens, parent=parent)[stride - 1 :: stride]
    keys: list[int] = []
    for place, start in enumerate(range(0, len(event.token_ids), event.block_tokens)):
        if place < len(extra) and extra[place]:
            parent = namespace_seed(str(parent), *map(str, extra[place]))
        block = event.token_ids[start : start + event.block_tokens]
        parent = block_keys(block, block_tokens=unit_tokens, parent=parent)[-1]
        keys.append(parent)
    return keys
