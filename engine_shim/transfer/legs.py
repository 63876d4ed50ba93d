"""The two halves of a request as a shim does them, by SGLang's contract and by vLLM's (``router/wire/handover``).

A prefill shim computes the prompt and one token, offers the prompt's pages under a key, and either answers when a
decode shim has them (SGLang's: the key is the room) or at once, with the key and its own address (vLLM's). A decode
shim gets the pages before it runs the request. One that is told of no prefill shim does all of it.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from engine_shim.api import ApiError, HandoverFields
from engine_shim.cache.radix import RadixCache
from engine_shim.engine import Engine
from engine_shim.transfer.link import Ask, Offers, TransferError, fetch
from engine_shim.transfer.parcel import PageStore, Parcel, known_pages, layout_name, pack, unpack
from engine_shim.types import Request

#: Told of pages that came from elsewhere: namespace, tokens, tables.
Noted = Callable[[str, Sequence[int], Sequence[Sequence[int]]], None]


@dataclass(frozen=True, slots=True)
class RankPages:
    """What a rank's pages hold, and who keeps book of it."""

    store: PageStore
    noted: Noted | None = None


class Leg(Protocol):
    """What is done for a request beside running it."""

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompts that nobody had to compute, if this leg knows better than the rank."""

    async def before(self, engine: Engine, requests: Sequence[Request]) -> None:
        """Before the rank gets the requests. Raises ``ApiError``."""

    async def after(self, engine: Engine, requests: Sequence[Request]) -> None:
        """When it has run them, before the last of the answer. Raises ``ApiError``."""

    def fields(self) -> Mapping[str, object]:
        """What a whole answer says of it."""

    def close(self) -> None:
        """The request is over, however it ended."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a shim with a role needs of itself. ``offers`` and ``port`` are a prefill shim's."""

    model: str
    pages: Sequence[RankPages]
    seconds: float
    tokens_per_second: float
    port: int = 0
    offers: Offers | None = None

    def leg(self, asked: HandoverFields, *, prompts: int, host: str) -> Leg | None:
        """The leg that a request's fields ask for, None for one that is none. ``host`` is this shim's as it was asked.

        Raises ``ApiError`` for fields that do not fit the role or each other.
        """
        params = asked.kv_transfer_params or {}
        if self.offers is not None:
            if asked.bootstrap_room is not None:
                keys = [f"room {room}" for room in asked.rooms(prompts)]
                return SendingLeg(self, self.offers, keys, shown=None)
            if params.get("do_remote_decode"):
                if prompts > 1:
                    raise ApiError("kv_transfer_params are those of one prompt", param="kv_transfer_params")
                key = uuid.uuid4().hex
                shown = {
                    "do_remote_prefill": True,
                    "do_remote_decode": False,
                    "remote_engine_id": self.model,
                    "remote_request_id": key,
                    "remote_block_ids": [],
                    "remote_host": host,
                    "remote_port": self.port,
                }
                return SendingLeg(self, self.offers, [key], shown=shown)
            return None
        if asked.bootstrap_room is not None:
            places = zip(asked.hosts(prompts), asked.ports(prompts), asked.rooms(prompts), strict=True)
            return ReceivingLeg(self, [Place(host, port, f"room {room}") for host, port, room in places])
        if params.get("do_remote_prefill"):
            return ReceivingLeg(self, [_place(params)])
        return None


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prompt's pages are."""

    host: str
    port: int
    key: str


def _place(params: Mapping[str, object]) -> Place:
    host, port, key = (params.get(name) for name in ("remote_host", "remote_port", "remote_request_id"))
    if not (isinstance(host, str) and isinstance(port, int) and isinstance(key, str)):
        raise ApiError(
            "kv_transfer_params need remote_host, remote_port and remote_request_id", param="kv_transfer_params"
        )
    return Place(host, port, key)


class SendingLeg:
    """A prefill shim's. ``shown`` None: the answer waits until all prompts have been fetched."""

    cached_tokens: int | None = None

    def __init__(
        self, transfer: Transfer, offers: Offers, keys: Sequence[str], *, shown: Mapping[str, object] | None
    ) -> None:
        self._transfer = transfer
        self._offers = offers
        self._keys = tuple(keys)
        self._shown = shown
        self._open: list[str] = []

    async def before(self, engine: Engine, requests: Sequence[Request]) -> None:
        """Let receivers know that there will be something to wait for."""
        for key in self._keys:
            try:
                self._offers.announce(key)
            except TransferError as error:
                raise ApiError(str(error), code="room_in_use", param="bootstrap_room") from error
            self._open.append(key)

    async def after(self, engine: Engine, requests: Sequence[Request]) -> None:
        """Offer the pages."""
        store = self._transfer.pages[engine.rank].store
        taken: list[asyncio.Future[None]] = []
        for key, request in zip(self._keys, requests, strict=True):
            parcel = await engine.with_cache(partial(self._packed, store=store, request=request))
            taken.append(self._offers.offer(key, parcel))
        if self._shown is not None:
            self._open.clear()  # they outlive the request
            return
        try:
            await asyncio.gather(*taken)
        except TransferError as error:
            raise _failed(error) from error

    def _packed(self, cache: RadixCache, *, store: PageStore, request: Request) -> Parcel:
        return pack(
            cache,
            store,
            request.namespace,
            request.prompt,
            model=self._transfer.model,
            cached_tokens=request.cached_tokens,
        )

    def fields(self) -> Mapping[str, object]:
        """Where the prompt can be fetched."""
        return {} if self._shown is None else {"kv_transfer_params": self._shown}

    def close(self) -> None:
        """Whoever still waits for a prompt waits for nothing."""
        for key in self._open:
            self._offers.withdraw(key, "the prefill request has ended")
        self._open.clear()


class ReceivingLeg:
    """A decode shim's."""

    def __init__(self, transfer: Transfer, places: Sequence[Place]) -> None:
        self._transfer = transfer
        self._places = tuple(places)
        self.cached_tokens: int | None = None

    async def before(self, engine: Engine, requests: Sequence[Request]) -> None:
        """Get every prompt's pages into the cache."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for place, request in zip(self._places, requests, strict=True):
                    tasks.create_task(self._receive(engine, place, request))
        except ExceptionGroup as group:
            error = group.exceptions[0]
            raise (_failed(error) if isinstance(error, TransferError) else error) from group

    async def _receive(self, engine: Engine, place: Place, request: Request) -> None:
        transfer, pages = self._transfer, self._transfer.pages[engine.rank]
        known = await engine.with_cache(lambda cache: known_pages(cache, request.namespace, request.prompt))
        layout = layout_name(engine.layout, model=transfer.model, contents=pages.store.contents)

        def enter(cache: RadixCache, parcel: Parcel) -> None:
            entered = unpack(cache, pages.store, request.namespace, request.prompt, parcel)
            if entered.tables and pages.noted is not None:
                tokens = request.prompt[: entered.pages * engine.layout.page_tokens]
                pages.noted(request.namespace, tokens, entered.tables)

        async def take(parcel: Parcel) -> None:
            if parcel.layout != layout:
                raise TransferError(f"pages of {parcel.layout} are of no use to {layout}")
            await asyncio.sleep(parcel.sent_pages * engine.layout.page_tokens / transfer.tokens_per_second)
            await engine.with_cache(lambda cache: enter(cache, parcel))
            self.cached_tokens = (self.cached_tokens or 0) + parcel.cached_tokens

        await fetch(place.host, place.port, Ask(place.key, known), seconds=transfer.seconds, take=take)

    async def after(self, engine: Engine, requests: Sequence[Request]) -> None:
        """There is nothing left to do."""

    def fields(self) -> Mapping[str, object]:
        """Nothing that anybody needs."""
        return {}

    def close(self) -> None:
        """``before`` is cancelled by whoever runs it."""


def _failed(error: TransferError) -> ApiError:
    return ApiError(f"The handover of the prompt failed: {error}.", status=500, code="handover_failed")
