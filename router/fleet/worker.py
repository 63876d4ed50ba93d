"""A registered worker, and what others do or know of workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field

from router.core.types import RankStatus
from router.fleet.doubles import Place
from router.fleet.event_stream import EventStream
from router.fleet.parity import Encode, Parity, Promised
from router.fleet.worker_api import WorkerInfo
from router.settings import WorkerSpec

#: Told slots, and those of all who leave: whether the others can answer for the models of the former.
CanSpare = Callable[[Collection[int], Collection[int]], bool]


@dataclass(slots=True, eq=False)
class Worker:
    """A registered worker. Written by the registry alone; ``reason`` says in a sentence why it is not ready."""

    spec: WorkerSpec
    status: RankStatus = RankStatus.PENDING
    reason: str = "not asked yet"
    info: WorkerInfo | None = None
    places: frozenset[Place] = frozenset()
    slots: tuple[int, ...] = ()
    is_draining: bool = False
    #: Off the list: it serves until these workers can, or others. None: on the list.
    awaits: frozenset[str] | None = None
    #: Its task, while the registry runs.
    life: asyncio.Task[None] | None = None
    #: ``end`` has been called. Its task cannot tell: each time-out within it looks like an end for a turn of the loop.
    is_ending: bool = False
    failed_probes: int = 0
    doubted: asyncio.Event = field(default_factory=asyncio.Event)
    streams: list[EventStream] = field(default_factory=list)
    parity: Mapping[int, Parity] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Its id in metrics, headers and the admin API."""
        return self.spec.name

    async def end(self) -> None:
        """Stop its task, and wait until that has cleared up."""
        self.is_ending = True
        if self.life is not None:
            self.life.cancel()
            await asyncio.wait([self.life])


async def _nothing_more(_: Worker) -> None:
    """The default for ``on_worker_ready``."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """What others do or know. ``on_worker_ready`` is awaited before a worker takes requests."""

    on_worker_ready: Callable[[Worker], Awaitable[None]] = _nothing_more
    encode: Encode = lambda _model, _body: None
    promised: Promised = lambda _slot, _tokens: 0
    has_progress: Callable[[Worker], bool] = lambda _: False
    can_spare: CanSpare = lambda _slots, _leaving: False
