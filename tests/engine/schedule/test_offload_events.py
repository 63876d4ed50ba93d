"""What routers are told of copies: a router's index beside the cache's own account of what lies where."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import takewhile

import pytest
from test_long_context_machine import walk as long_walk
from test_offload_machine import OffloadMachine, walk
from test_scheduler_machine import Resident, replay

from engine_shim.types import GroupKind
from router.core.index import PrefixIndex
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import EventBatch, decode_batch, encode_batch


def usable(hashes: list[int], resident: Resident, machine: OffloadMachine) -> int:
    """Pages of a prompt that the device can reuse, by trying every boundary on what is said to be resident."""
    full = len(list(takewhile(resident.get(("GPU", 0), set()).__contains__, hashes)))
    reach = machine.layout.window_pages()
    for boundary in range(full, 0, -1):
        for group in machine.layout.groups[1:]:
            behind = {GroupKind.WINDOW: reach, GroupKind.STATE: 1}.get(group.kind, 0)
            needed = hashes[max(0, boundary - behind) : boundary]
            if not resident.get(("GPU", group.index), set()).issuperset(needed):
                break
        else:
            return boundary
    return 0


@pytest.mark.parametrize(("walk", "seed"), [*((walk, seed) for seed in range(1, 9)), (long_walk, 2), (long_walk, 5)])
def test_a_router_follows_every_medium(
    walk: Callable[[int], OffloadMachine], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoded, decoded and applied to the router's index, each step's events say how much of a prompt lies where.

    For full attention, windows and states, through restarts, beside the cache's own account of what is resident; also
    where most contexts are longer than the device.
    """
    page = 1 + seed % (3 if walk is long_walk else 4)
    index = PrefixIndex(block_tokens=page)
    index.add_rank(0, domain="shim")
    asked = Counter[str]()

    def follow(machine: OffloadMachine) -> None:
        if machine.restarts > asked["restarts"]:  # a new epoch
            asked["restarts"] = machine.restarts
            index.clear(0)
        for event in decode_batch(encode_batch(EventBatch(0.0, machine.scheduler.take_events()))).events:
            index.apply(0, event)
        resident: Resident = {}
        replay(machine.scheduler.snapshot_events(), resident)
        device = resident.get(("GPU", 0), set())
        anywhere = device.union(*(resident.get((medium, 0), set()) for medium in ("CPU", "STORAGE")))
        for request in list(machine.requests.values())[-8:]:
            prompt = request.tokens
            hashes = block_keys(prompt, block_tokens=page, parent=namespace_seed(""))[: (len(prompt) - 1) // page]
            keys = block_keys(prompt, block_tokens=page, parent=namespace_seed("", ""))
            loadable = page * len(list(takewhile(anywhere.__contains__, hashes)))
            if anywhere != device:
                found = index.loadable_tokens(keys, prompt_tokens=len(prompt))
                assert found.get(0, 0) == loadable
            reusable = page * usable(hashes, resident, machine)
            assert index.reusable_tokens(keys, prompt_tokens=len(prompt)).get(0, 0) == reusable
            asked.update(all=1, below=loadable > reusable, reused=reusable > 0)

    monkeypatch.setattr(OffloadMachine, "agrees", follow)
    machine = walk(seed)
    assert min(asked["below"], asked["reused"]) > 100
    assert machine.restarts > 0 or machine.sizes[1] is None
