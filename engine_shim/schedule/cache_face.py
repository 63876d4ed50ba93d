"""A rank's cache as others than its scheduler see it: publishers, movers, shadows, whoever hands prompts over."""

from __future__ import annotations

from array import array

from engine_shim.cache.events import EventRecorder
from engine_shim.cache.radix import RadixCache
from engine_shim.cache.transfers import Place
from engine_shim.schedule.memory import Memory
from router.wire.kv_events import Event


class CacheFace:
    """What of the cache is told and lent, between two steps."""

    def __init__(self, memory: Memory, events: EventRecorder) -> None:
        self._memory = memory
        self._events = events

    def take_events(self) -> tuple[Event, ...]:
        """How the cache changed since the last call, in order."""
        return self._events.take()

    def snapshot_events(self) -> tuple[Event, ...]:
        """Store events that rebuild the cache as it is; take the pending ones first, they are part of it."""
        return self._memory.snapshot_events()

    def reset_cache(self) -> bool:
        """Forget all prefixes; False, and nothing done, while a request holds pages."""
        if not self._memory.is_idle:
            return False
        self._memory.reset()
        return True

    @property
    def cache(self) -> RadixCache:
        """The prefix cache itself, for whoever brings pages in or takes copies of them, between two steps."""
        return self._memory.cache

    @property
    def copy_generations(self) -> dict[Place, tuple[array[int], ...]]:
        """The same for the slots of every place that pages move between."""
        offload = self._memory.offload
        return {Place.DEVICE: self.generations, **(offload.generations if offload else {})}

    @property
    def generations(self) -> tuple[array[int], ...]:
        """For each group how often each of its pages has been freed: whoever saw another number saw another page."""
        return tuple(pool.generations for pool in self._memory.cache.pools)
