"""All that is known of the ranks, in one place with one owner: status, index, load, pace, sessions.

Registry, probes and event streams write it; the brain reads it and opens claims. Everything runs on the event loop,
so a decision sees one consistent moment. No I/O here.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import MappingProxyType

from router.core.breaker import BreakerParameters, Breakers
from router.core.continuity_types import MAY_BE_ANOTHER, Cause
from router.core.forecast import Pool
from router.core.fullness import FullRanks
from router.core.index import PrefixIndex
from router.core.load import LoadBook
from router.core.pace import PaceLearner, PacePeers, prior
from router.core.radix_pool import RadixPool
from router.core.returns import Conversation
from router.core.seen import TextIndex
from router.core.session_table import SessionTable
from router.core.types import WHOLE, Engine, FleetView, RankId, RankLoad, RankStatus, SessionKey
from router.core.usable import Geometry
from router.fleet.gauges import unwatch, watch
from router.fleet.indexes import Indexes
from router.fleet.member import HeldBack, Member, RankInfo
from router.fleet.shared import ChangedCharges, Embedded, SharedState
from router.fleet.target import ModelCard, Target
from router.settings import RoutingSettings
from router.telemetry.metrics import Metrics
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import AllBlocksCleared, BlockStored, EventBatch, Snapshot

#: After a reset that the router made, an engine may be so late with the clear that belongs to it.
CLEAR_SECONDS = 5.0


class Fleet:
    """The one writer of the routing state. ``view`` is replaced whenever a rank comes, goes or changes status."""

    def __init__(
        self,
        settings: RoutingSettings,
        metrics: Metrics,
        *,
        clock: Callable[[], float],
        shared: SharedState | None = None,
    ) -> None:
        self.view = FleetView()
        #: Names of all models that a known rank serves.
        self.models: frozenset[str] = frozenset()
        self.shared: SharedState = shared or Embedded()
        self.breakers = Breakers(
            BreakerParameters(
                failures=settings.breaker_failures,
                open_seconds=settings.breaker_seconds,
                max_open_ratio=settings.breaker_max_ratio,
            )
        )
        self.full = FullRanks()
        self.loads = LoadBook(is_shared=self.shared.is_shared)
        self.sessions = SessionTable(max_sessions=settings.max_sessions, idle_seconds=settings.session_idle_seconds)
        #: Which prefill rank computed a session's last prompt, where answers are made elsewhere.
        self.prompts = SessionTable(max_sessions=settings.max_sessions, idle_seconds=settings.session_idle_seconds)
        self.texts = TextIndex()
        self.clock = clock
        self._settings = settings
        self._metrics = metrics
        #: Told the name of a worker that a request could not be sent to.
        self.on_unreachable: Callable[[str], None] = lambda _worker: None
        #: Told a conversation that another router serves from now on.
        self.on_taken: Callable[[Conversation], None] = lambda _conversation: None
        #: Told of a rank of whose full cache nothing is foretold until it is cleared, and why.
        self.on_failed_forecast: Callable[[RankId, Exception], None] = lambda _rank, _error: None
        #: Tokens of the contexts that admission charges each rank with.
        self.charged: Callable[[], Mapping[RankId, int]] = dict
        #: The conversations that it charges otherwise than it last said.
        self.changed_charges: ChangedCharges = lambda *, whole: (whole, ())
        self._members: dict[int, Member] = {}
        self._slots: dict[RankId, int] = {}
        self._held: dict[int, HeldBack] = {}
        self._geometries: dict[str, Geometry] = {}
        self._peers: dict[frozenset[str], PacePeers] = {}
        self._indexes = Indexes(settings.max_index_blocks, on_failed_forecast=self._note_failed_forecast)
        metrics.sessions.set_function(lambda: len(self.sessions))
        metrics.index_entries.set_function(self._indexes.blocks)
        metrics.index_used.set_function(self._indexes.used)
        metrics.index_evicted.set_function(self._indexes.evicted_blocks)

    def set_geometry(self, model: str, geometry: Geometry) -> None:
        """What no event stream says of a model. Holds for ranks that are added later."""
        self._geometries[model] = geometry

    # --- membership ---------------------------------------------------------------------------------

    def add_rank(
        self,
        rank_id: RankId,
        /,
        *,
        target: Target,
        models: frozenset[str],
        block_tokens: int | None,
        pool_tokens: int | None,
        pool_blocks: int | None = None,
        prefill_chunk_tokens: int | None = None,
        max_running_requests: int | None = None,
        retention_tokens: int | None = None,
        cards: Mapping[str, ModelCard] | None = None,
    ) -> int:
        """Know a rank, PENDING at first. Returns its slot: the lowest that is free.

        ``pool_blocks`` are for all groups of layers together; of prompts no more than ``prefill_chunk_tokens`` are
        computed at once.
        """
        slot = next(number for number in range(len(self._members) + 1) if number not in self._members)
        pace = prior(
            self._settings.prefill_tokens_per_second,
            transfer_tokens_per_second=self._settings.transfer_tokens_per_second,
        )
        member = Member(
            slot=slot,
            id=rank_id,
            target=target,
            models=models,
            status=RankStatus.PENDING,
            pace=pace,
            learner=PaceLearner(pace, self._peers.setdefault(models, PacePeers())),
            load=self.loads.load(slot),
            pool_tokens=pool_tokens,
            pool_blocks=pool_blocks,
            prefill_chunk_tokens=prefill_chunk_tokens,
            max_running_requests=max_running_requests,
            retention_tokens=retention_tokens,
            cards=cards or {},
        )
        self._members[slot] = member
        self._slots[rank_id] = slot
        if block_tokens is not None:
            self._join_index(member, block_tokens)
        watch(member, metrics=self._metrics, breaker=lambda: self.breakers.state(slot, now=self.clock()))
        self._publish()
        return slot

    def remove_rank(self, slot: int) -> None:
        """Forget a rank with all it held, its load and its sessions."""
        member = self._members.pop(slot)
        del self._slots[member.id]
        self._held.pop(slot, None)
        member.learner.leave()
        if all(other.models != member.models for other in self._members.values()):
            del self._peers[member.models]
        if member.index is not None:
            self._indexes.leave(member.index, slot)
        self.loads.forget(slot)
        self.breakers.forget(slot)
        self.full.forget(slot)
        self.sessions.forget_slot(slot)
        self.prompts.forget_slot(slot)
        self.texts.forget(slot)
        unwatch(member, metrics=self._metrics)
        self._publish()

    def set_status(self, slot: int, status: RankStatus) -> None:
        """Change what a rank may be given. Setting what is set already does nothing."""
        member = self._members[slot]
        if member.status is not status:
            member.status = status
            self._publish()

    def member(self, slot: int) -> Member:
        """A known rank. Raises ``KeyError``."""
        return self._members[slot]

    def knows(self, member: Member) -> bool:
        """Whether the rank is still there: its slot may be another's by now."""
        return self._members.get(member.slot) is member

    def beside(self, member: Member) -> frozenset[int]:
        """Slots of the ranks that are reached at the same address."""
        place = member.target[:2]
        return frozenset(slot for slot, other in self._members.items() if other.target[:2] == place)

    def members(self) -> Sequence[Member]:
        """All known ranks, by slot."""
        return [self._members[slot] for slot in sorted(self._members)]

    def indexes(self, model: str) -> Sequence[PrefixIndex]:
        """The indexes whose ranks serve a model: one a block size. What was held back too long counts by now."""
        if self._held:
            now = self.clock()
            for slot in [slot for slot, held in self._held.items() if now >= held.until]:
                self._believe_unasked(self._members[slot], now=now)
        return self._indexes.serving(model)

    def let_go(self) -> bool:
        """Go on with what the indexes are to let go of. False: nothing is left to do."""
        return self._indexes.let_go()

    # --- other replicas -----------------------------------------------------------------------------

    def home(
        self,
        model: str,
        session: SessionKey,
        *,
        now: float,
        held: Mapping[int, int] = MappingProxyType({}),
        is_prefill: bool = False,
    ) -> int | None:
        """The slot of a rank that served this session, here or at another replica: see ``SessionTable.home``."""
        table, elsewhere = self.homes(is_prefill=is_prefill), self.shared.home(model, session, is_prefill=is_prefill)
        if elsewhere is not None and (slot := self._slots.get(elsewhere.rank)) is not None:
            used_at, is_own = elsewhere.used_at, elsewhere.is_own
            table.adopt(model, session, slot=slot, used_at=used_at, now=now, is_own=is_own)
        return table.home(model, session, now=now, held=held)

    def homes(self, *, is_prefill: bool) -> SessionTable:
        """Where it is noted which rank a session used last, for its prompts to be computed or to be answered."""
        return self.prompts if is_prefill else self.sessions

    def set_elsewhere(self, rank_id: RankId, load: RankLoad) -> None:
        """What the other replicas have on a rank; one that is not known here does not matter."""
        if (slot := self._slots.get(rank_id)) is not None:
            self.loads.set_elsewhere(slot, load, now=self.clock())

    def url_of(self, model: str) -> str | None:
        """The base URL of a ready worker that serves a model, for questions; None without one."""
        member = next((one for one in self.members() if one.status is RankStatus.READY and model in one.models), None)
        return None if member is None else member.target.url

    # --- cache events -------------------------------------------------------------------------------

    def apply(self, slot: int, batch: EventBatch, *, now: float, is_last: bool = True) -> bool:
        """Bring a rank's events into its index. Unless it ``is_last``, more of the batch follows.

        False: a group with smaller blocks turned up, or one that is not what it was, so the picture so far was thrown
        away and the rank's events must be read again from their start.
        """
        member = self._members[slot]
        if slot in self._held:
            return self._apply_held(member, batch, now=now, is_last=is_last)
        whole = True
        is_torn, member.is_torn = member.is_torn, False
        unit_tokens = math.gcd(
            member.block_tokens or 0,
            *(
                event.block_tokens
                for event in batch.events
                if isinstance(event, BlockStored) and (member.index is None or member.index.fits(slot, event))
            ),
        )
        if unit_tokens != (member.block_tokens or 0):
            whole = member.index is None or not member.index.blocks(slot)
            self._join_index(member, unit_tokens)
        entered = member.entered_blocks
        counts = Counter(type(event).__name__ for event in batch.events)
        if member.index is not None:
            for event in batch.events:
                member.index.apply(slot, event)
            if is_last:
                member.index.end_batch(slot)
            whole = not member.index.was_contradicted(slot) and whole
        self._indexes.tidy()
        if AllBlocksCleared.__name__ in counts:
            member.cleared_at, member.idle_events = now, 0
            self.texts.forget(slot)
        stored = sum(isinstance(event, BlockStored) and event.is_on_device for event in batch.events)
        member.idle_events = member.idle_events + stored if member.entered_blocks == entered else 0
        for name, count in counts.items():
            self._metrics.events.labels(*member.labels, name).inc(count)
        self._measure(member)
        return whole and not is_torn

    def expect_clear(self, slot: int, *, since: float) -> None:
        """The rank's cache was emptied through the router, which asked for it at ``since``. vLLM's own clear comes with
        its next step.

        What arrives before it is older than the reset. Where the engine's clear was quicker than its answer, what the
        rank has by now is newer.
        """
        if self._members[slot].cleared_at < since:
            self.clear(slot, "reset")
            self._held[slot] = HeldBack(self.clock() + CLEAR_SECONDS)

    def _apply_held(self, member: Member, batch: EventBatch, *, now: float, is_last: bool) -> bool:
        held = self._held[member.slot]
        places = [place for place, event in enumerate(batch.events) if isinstance(event, AllBlocksCleared)]
        if places:
            held.batches.clear()
            batch = replace(batch, events=batch.events[places[-1] :])
        held.batches.append((batch, is_last))
        return self._believe(member.slot, now=now) if places or now >= held.until else True

    def _believe(self, slot: int, *, now: float) -> bool:
        """What was held back counts after all. Returns as ``apply`` does."""
        outcomes = [self.apply(slot, each, now=now, is_last=is_last) for each, is_last in self._held.pop(slot).batches]
        return all(outcomes)

    def _believe_unasked(self, member: Member, *, now: float) -> None:
        """The same for a decision, which cannot help it if the picture is gone: the rank's next event tells."""
        try:
            member.is_torn = not self._believe(member.slot, now=now)
        except Exception:  # noqa: BLE001 - the boundary: what one worker says must not fail a request
            self._metrics.event_damage.labels(*member.labels).inc()
            self.clear(member.slot, Cause.DAMAGE)
            member.is_torn = True

    def clear(self, slot: int, cause: str) -> None:
        """Throw a rank's picture away: nothing stale is trusted."""
        member = self._members[slot]
        self._held.pop(slot, None)
        member.idle_events, member.is_torn = 0, False
        if member.index is not None:
            begin = member.index.begin_anew if cause in MAY_BE_ANOTHER else member.index.clear
            begin(slot)
        self.texts.forget(slot)
        self._metrics.resyncs.labels(*member.labels, cause).inc()
        self._measure(member)

    def load_snapshot(self, slot: int, snapshot: Snapshot, *, now: float, is_last: bool = True) -> bool:
        """Replace a rank's picture by what the rank itself says it holds. Returns as ``apply`` does."""
        member = self._members[slot]
        if member.index is not None:
            member.index.clear(slot)
        if (held := self._held.get(slot)) is not None:
            held.batches.clear()
        member.is_torn = False
        return self.apply(slot, snapshot.batch, now=now, is_last=is_last)

    def _join_index(self, member: Member, block_tokens: int) -> None:
        groups: Sequence[BlockStored] = ()
        if member.index is not None:
            groups = member.index.met(member.slot)
            self._indexes.leave(member.index, member.slot)
        member.index = self._indexes.of(member.models, block_tokens=block_tokens)
        member.block_tokens = block_tokens
        geometry = next((self._geometries[model] for model in sorted(member.models) if model in self._geometries), None)
        blocks = member.pool_tokens // block_tokens if member.pool_tokens else None
        if blocks and member.target.engine is Engine.VLLM:
            blocks -= 1  # one stands for no block at all
        pool = Pool(blocks, all_blocks=member.pool_blocks)
        if member.target.engine is Engine.SGLANG:
            pool = RadixPool(blocks, page_tokens=block_tokens, seats=member.max_running_requests)
        member.index.add_rank(
            member.slot,
            domain=member.target.engine,
            geometry=geometry,
            pool=pool,
            retention_tokens=member.retention_tokens,
        )
        member.index.meet(member.slot, groups)
        self._measure(member)

    def _note_failed_forecast(self, slot: int, error: Exception) -> None:
        member = self._members[slot]
        self._metrics.failed_forecasts.labels(*member.labels).inc()
        self.on_failed_forecast(member.id, error)

    def _measure(self, member: Member) -> None:
        if member.index is not None:
            index, slot = member.index, member.slot
            member.residency.tokens = index.blocks(slot) * index.stride(slot) * index.block_tokens

    def promised_tokens(self, slot: int, tokens: Sequence[int]) -> int:
        """What events say a rank could reuse of a prompt without salt or adapter. For the self-check."""
        member = self._members.get(slot)
        if member is None or member.index is None:
            return 0
        keys = block_keys(tokens, block_tokens=member.index.block_tokens, parent=namespace_seed("", ""))
        return member.index.reusable_tokens(keys, prompt_tokens=len(tokens), tokens=tokens).get(slot, 0)

    # --- what others see ------------------------------------------------------------------------------

    def ranks(self) -> list[RankInfo]:
        """All ranks for the admin plane."""
        return [member.info(self.breakers.state(member.slot, now=self.clock())) for member in self.members()]

    def session_list(self, limit: int) -> list[tuple[str, SessionKey, RankId, float]]:
        """The most recently used sessions: model, session, home, seconds since last use."""
        now = self.clock()
        return [
            (model, key, self._members[binding.slot].id, now - binding.used_at)
            for (model, key), binding in islice(self.sessions.recent(), limit)
            if binding.slot in self._members
        ]

    def _publish(self) -> None:
        self.models = frozenset(model for member in self._members.values() for model in member.models)
        self.view = FleetView(
            ranks=tuple(member.view(self.loads.total(member.slot)) for member in self.members()),
            version=self.view.version + 1,
            is_disaggregated=any(member.target.part != WHOLE for member in self._members.values()),
        )
