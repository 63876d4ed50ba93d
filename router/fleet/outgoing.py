"""Workers that are off the list, and serve on until others can.

A reload that replaces a worker by one that is not ready yet, or never will be, must not be an outage. So what is taken
off the list stays in the fleet as it is

- while one that was listed in its place is on its way, and
- no other ready ranks serve all of its models, or as many have gone as are ready of those listed in their place.

Where nothing was listed in its place, or all of that is ready, it goes at once, whoever is left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

from structlog.typing import FilteringBoundLogger

from router.core.types import RankStatus
from router.fleet.worker import CanSpare, Worker

_SERVING = (RankStatus.READY, RankStatus.DRAINING)


class Outgoing:
    """Those workers; each keeps the names that it waits for in ``awaits``."""

    def __init__(self, can_spare: CanSpare, log: FilteringBoundLogger) -> None:
        self._can_spare = can_spare
        self._log = log
        self._workers: list[Worker] = []
        self._gone = 0  # while others stay

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers)

    def add(self, worker: Worker) -> None:
        """It is off the list."""
        worker.awaits = frozenset()
        self._workers.append(worker)

    def take(self, worker: Worker) -> None:
        """It is none of these any more."""
        if worker in self._workers:
            self._workers.remove(worker)
            worker.awaits = None

    async def await_also(self, names: Collection[str], listed: Mapping[str, Worker]) -> None:
        """Others have come on the list, and some may have left it, for whom nobody waits any more."""
        for worker in self._workers:
            known = [name for name in worker.awaits or () if name in listed]
            worker.awaits = frozenset([*known, *names])
        await self.end_dispensable(listed)
        for worker in self._workers:
            awaited = sorted(worker.awaits or ())
            self._log.warning("worker stays until it can be spared", worker=worker.name, awaits=awaited)

    def dispensable(self, listed: Mapping[str, Worker]) -> list[Worker]:
        """Those that may go now. One that was listed and removed by hand is waited for: it never became ready."""
        ready = {name for name, worker in listed.items() if worker.status is RankStatus.READY}
        leaving = {slot for worker in self._workers for slot in worker.slots}
        awaited = frozenset[str]().union(*(worker.awaits or () for worker in self._workers))
        room, going = len(awaited & ready) - self._gone, []
        for worker in self._workers:
            if worker.status not in _SERVING or not (worker.awaits or frozenset()) - ready:
                going.append(worker)
            elif room > 0 and self._can_spare(worker.slots, leaving):
                going.append(worker)
                room -= 1
        return going

    async def end_dispensable(self, listed: Mapping[str, Worker]) -> None:
        """Let those go. Until it is over each is one of these: whoever has its name waits for that."""
        for worker in self.dispensable(listed):
            if worker not in self._workers:  # listed again while another ended
                continue
            await worker.end()
            if worker in self._workers:
                self.take(worker)
                self._gone = self._gone + 1 if self._workers else 0
                self._log.info("worker removed", worker=worker.name)

    async def replace(self, successor: Worker, *, remove_rank: Callable[[int], None]) -> bool:
        """Of workers of one name only one can be in the fleet: until now perhaps one of these. True: it has served."""
        is_served = False
        for worker in [each for each in self._workers if each.name == successor.name and each is not successor]:
            slots, worker.slots = worker.slots, ()
            try:
                await worker.end()  # its ranks serve until it has ended
            finally:
                self.take(worker)
                for slot in slots:
                    remove_rank(slot)
            is_served |= bool(slots) and worker.status is RankStatus.READY
            self._log.info("worker replaced", worker=worker.name)
        return is_served
