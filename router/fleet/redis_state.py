"""State shared over Redis: moves the books of ``shared`` between the replicas.

Three tasks, each with a connection that nobody else touches, so that no request's cancellation can break one midway:
one hears the news, one tells, one looks sessions up. Requests only read and mark the books. Whatever Redis does (slow,
full, restarted, gone) is counted and met by connecting anew; meanwhile each replica goes on with what it knows, and the
others' load is forgotten with its lease. After a reconnection everything this process sent somewhere is told again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TypeVar

from redis import exceptions
from redis.asyncio import Redis
from structlog.typing import FilteringBoundLogger

from router.core.returns import Conversation
from router.core.types import RankId, SessionKey
from router.errors import WireError
from router.fleet.fleet import Fleet
from router.fleet.redis_link import ANSWER_SECONDS, BROKEN, connect, evaluate, goes_on, shown, trouble
from router.fleet.registry import Registry
from router.fleet.shared import HomeBook, PeerLoads, SharedHome, hear_loads, tell_loads
from router.fleet.shared_workers import WorkerBook, carry_out, records
from router.settings import SharedSettings
from router.telemetry.metrics import Metrics
from router.wire import redis as wire

_FIRST_RETRY_SECONDS = 0.05
_LAST_RETRY_SECONDS = 1.0
#: Homes written or looked up in one round trip, and round trips between two signs of life.
_BATCH = 256
_BATCHES_A_TURN = 8
#: A worker is known to new replicas for so long after the last replica that had it; a removal is remembered longer.
_WORKER_LEASE_SECONDS = 15.0
_REMOVAL_LEASE_SECONDS = 600.0
_SYNC_SECONDS = 1.0
_FAREWELL_SECONDS = 0.2
#: Turns of the event loop from an answer in a socket to whoever asked.
_TURNS_TO_READ = 8
_T = TypeVar("_T")


class RedisState:
    """Implements ``SharedState``. ``run`` keeps it in touch with the other replicas until cancelled."""

    is_shared = True

    def __init__(
        self,
        settings: SharedSettings,
        *,
        max_sessions: int,
        idle_seconds: float,
        replica: str,
        metrics: Metrics,
        log: FilteringBoundLogger,
        clock: Callable[[], float],
    ) -> None:
        """``replica`` names this process among the others. Raises ``ValueError`` for a URL that is none."""
        assert settings.redis_url is not None
        self._settings = settings
        self._names = wire.Names(settings.prefix)
        self._replica = replica
        self._metrics = metrics
        self._log = log
        self._clock = clock
        self._connect = partial(connect, settings.redis_url, name=f"homing-{replica}")
        self._connect()  # a bad URL shows now
        self._homes = HomeBook(max_sessions=max_sessions, idle_seconds=idle_seconds)
        self._peers = PeerLoads(lease_seconds=settings.lease_seconds)
        self._workers = WorkerBook()
        self._echo_at = -math.inf
        self._trouble = {"url": shown(settings.redis_url), "cause": "no answer"}
        self._refused: set[str] = set()
        self._has_deeds = False
        self._is_whole_due = True
        self._is_carrying_out = False
        self._wake = asyncio.Event()
        self._asked = asyncio.Event()
        self._asks: dict[bytes, asyncio.Future[None]] = {}
        self._can_answer = False
        self._asking_since: float | None = None
        metrics.shared_up.labels("redis").set_function(lambda: float(self.is_up))
        metrics.shared_replicas.set_function(lambda: 1 + len(self._peers))

    @property
    def is_up(self) -> bool:
        """This process's own news came back from Redis within the lease; Redis answers, and takes what it is told."""
        return self._can_answer and not self._refused and self._clock() - self._echo_at <= self._settings.lease_seconds

    # --- asked by requests ------------------------------------------------------------------------------

    def home(self, model: str, session: SessionKey, *, is_prefill: bool = False) -> SharedHome | None:
        """Where any replica last sent the session, as far as this process has heard."""
        return self._homes.get(wire.session_digest(model, *session, is_prefill=is_prefill), now=self._clock())

    def bound(
        self, model: str, session: SessionKey, rank: RankId, *, prompt_tokens: int, is_prefill: bool = False
    ) -> None:
        """Remember, and tell the others soon."""
        digest = wire.session_digest(model, *session, is_prefill=is_prefill)
        self._homes.use(digest, rank, prompt_tokens=prompt_tokens, now=self._clock(), conversation=(model, session))
        if self._homes.has_untold:
            self._wake.set()

    def charges(self, model: str, session: SessionKey) -> Mapping[RankId, int]:
        """What the other replicas charge the session with."""
        return self._peers.charges(wire.session_digest(model, *session))

    async def look_up(self, model: str, session: SessionKey, *, in_pairs: bool = False) -> None:
        """Ask Redis where the session is at home, unless that is known or Redis is not answering as it is."""
        digest, now = wire.session_digest(model, *session), self._clock()
        budget = self._settings.lookup_seconds
        if self._homes.is_certain(digest, now=now) or not budget:
            return
        is_slow = self._asking_since is not None and now - self._asking_since > budget
        if is_slow or not self._can_answer:
            self._metrics.shared_lookups.labels("skipped").inc()
            return
        asks = [self._ask_for(digest)]
        if in_pairs:
            asks.append(self._ask_for(wire.session_digest(model, *session, is_prefill=True)))
        await asyncio.wait(asks, timeout=budget)
        for _ in range(_TURNS_TO_READ):
            # On a busy machine time is over before the loop has looked at its sockets, where the answer may lie.
            if is_answered := all(ask.done() for ask in asks):
                break
            await asyncio.sleep(0)
        known = self._homes.get(digest, now=self._clock()) is not None
        self._metrics.shared_lookups.labels("late" if not is_answered else "found" if known else "new").inc()

    def _ask_for(self, digest: bytes) -> asyncio.Future[None]:
        if digest not in self._asks:
            self._asks[digest] = asyncio.get_running_loop().create_future()
            self._asked.set()
        return self._asks[digest]

    # --- kept in touch ----------------------------------------------------------------------------------

    async def run(self, fleet: Fleet, registry: Registry) -> None:
        """Exchange homes, loads and workers with the other replicas."""
        self._workers.configured(records(registry).values(), now=self._clock())
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep("listen", lambda redis: self._listen(redis, fleet)))
            tasks.create_task(self._keep("tell", lambda redis: self._tell(redis, fleet, registry)))
            tasks.create_task(self._keep("look_up", self._answer))
            tasks.create_task(self._watch(fleet, registry))

    async def _keep(self, operation: str, converse: Callable[[Redis], Awaitable[None]]) -> None:
        """Hold one conversation with Redis, and begin it anew whenever it breaks."""
        wait = _FIRST_RETRY_SECONDS
        while goes_on():
            began_at = self._clock()
            redis = self._connect()
            try:
                await converse(redis)
            except BROKEN as error:
                self._count(operation, error)
            except Exception as error:  # noqa: BLE001 - the boundary: nothing that Redis says may end the router
                self._log.exception("shared state failed", operation=operation)
                self._count(operation, error)
            finally:
                with contextlib.suppress(*BROKEN):
                    await redis.aclose()
            if self._clock() - began_at > ANSWER_SECONDS + _LAST_RETRY_SECONDS:
                wait = _FIRST_RETRY_SECONDS
            await asyncio.sleep(wait * random.uniform(0.5, 1.0))
            wait = min(2 * wait, _LAST_RETRY_SECONDS)

    def _count(self, operation: str, error: Exception) -> None:
        self._metrics.shared_errors.labels(operation, trouble(error)).inc()
        self._trouble["cause"] = f"{trouble(error)}: {error}"
        self._log.debug("shared state", operation=operation, trouble=trouble(error).value, error=str(error))

    async def _watch(self, fleet: Fleet, registry: Registry) -> None:
        """Let go of silent replicas, see what operators do here, and report when Redis comes and goes."""
        was_up: bool | None = None
        while True:
            await asyncio.sleep(self._settings.lease_seconds / 4)
            self._set_loads(fleet, self._peers.expire(now=self._clock()))
            if not self._is_carrying_out and self._workers.observe(records(registry), now=self._clock()):
                self._has_deeds = True
                self._wake.set()
            if self.is_up is not was_up:
                was_up = self.is_up
                if was_up:
                    self._log.info("shared state is up", replicas=1 + len(self._peers))
                else:
                    self._log.warning("shared state is not up: this replica goes on by itself", **self._trouble)

    # --- hearing ----------------------------------------------------------------------------------------

    async def _listen(self, redis: Redis, fleet: Fleet) -> None:
        lease = self._settings.lease_seconds
        pubsub = redis.pubsub()
        try:
            await pubsub.subscribe(self._names.news)
            heard_at = self._clock()
            while goes_on():
                message = await pubsub.get_message(timeout=lease)
                now = self._clock()
                if message is None:
                    if now - max(heard_at, self._echo_at) > 2 * lease:
                        raise exceptions.TimeoutError("nothing comes back, not even what this replica says")
                elif message["type"] == "subscribe":
                    self._homes.gap(now=now)
                    self._peers.gap()
                    heard_at = now
                elif message["type"] == "message":
                    self._hear(message["data"], fleet, now=now)
        finally:
            await pubsub.aclose()  # type: ignore[no-untyped-call]

    def _hear(self, message: bytes, fleet: Fleet, *, now: float) -> None:
        try:
            news = wire.decode_news(message)
        except WireError as error:
            self._count("listen", error)
            return
        if news.replica == self._replica:
            self._echo_at = now
            return
        match news:
            case wire.Homes(homes=homes):
                for home in homes:
                    if (taken := self._hear_home(home, now=now)) is not None:
                        fleet.on_taken(taken)
            case wire.Loads(replica=replica, ranks=ranks, charges=charges, is_whole=is_whole):
                self._is_whole_due |= replica not in self._peers
                loads = hear_loads(ranks, now=now)
                self._set_loads(fleet, self._peers.hear(replica, loads, now=now, charges=charges, is_whole=is_whole))
            case wire.Farewell(replica=replica):
                self._set_loads(fleet, self._peers.forget(replica))
            case wire.WorkersChanged():
                self._has_deeds = True
        if self._homes.has_untold or self._has_deeds:
            self._wake.set()

    def _hear_home(self, home: wire.Home, *, now: float) -> Conversation | None:
        return self._homes.hear(
            home.digest,
            RankId(home.worker, home.rank),
            used_at=now - max(0.0, home.age_seconds),
            prompt_tokens=home.prompt_tokens,
            now=now,
        )

    def _set_loads(self, fleet: Fleet, ranks: set[RankId]) -> None:
        for rank in ranks:
            fleet.set_elsewhere(rank, self._peers.total(rank, now=self._clock()))

    # --- telling ----------------------------------------------------------------------------------------

    async def _tell(self, redis: Redis, fleet: Fleet, registry: Registry) -> None:
        self._homes.tell_again()
        self._is_whole_due = True
        publish_at = sync_at = -math.inf
        try:
            while goes_on():
                await self._tell_homes(redis)
                now = self._clock()
                if now >= publish_at:
                    await self._say(redis, self._loads(fleet, now=now))
                    publish_at = now + self._settings.publish_seconds
                if now >= sync_at or self._has_deeds:
                    await self._sync(redis, registry)
                    sync_at = now + _SYNC_SECONDS
                await self._rest(publish_at - self._clock())
        except asyncio.CancelledError:
            with contextlib.suppress(*BROKEN):
                async with asyncio.timeout(_FAREWELL_SECONDS):
                    await self._say(redis, wire.Farewell(self._replica))
            raise

    def _loads(self, fleet: Fleet, *, now: float) -> wire.Loads:
        """All work, and of its charges what has changed; all of them to those who have not heard of them."""
        is_whole, changed = fleet.changed_charges(whole=self._is_whole_due)
        self._is_whole_due = False
        charges = [wire.Charged(wire.session_digest(of[0], *of[1]), *rank, tokens) for of, rank, tokens in changed]
        loads = [(member.id, member.load) for member in fleet.members()]
        works = tell_loads(loads, now=now, charged_tokens=fleet.charged())
        return wire.Loads(self._replica, works, charges, is_whole)

    async def _rest(self, seconds: float) -> None:
        """Until somebody must be told something, or a sign of life is due."""
        if not self._homes.has_untold and not self._has_deeds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, seconds)):
                    await self._wake.wait()
        self._wake.clear()

    async def _say(self, redis: Redis, news: wire.News) -> None:
        await redis.publish(self._names.news, wire.encode_news(news))

    async def _tell_homes(self, redis: Redis) -> None:
        """To the others at once, and to the store for those that come later. A full store still passes news on."""
        for _ in range(_BATCHES_A_TURN):
            now = self._clock()
            taken = self._homes.take_untold(_BATCH, now=now)
            if not taken:
                return
            homes = [
                wire.Home(digest, home.rank.worker, home.rank.rank, home.prompt_tokens, now - home.used_at)
                for digest, home in taken
            ]
            await self._say(redis, wire.Homes(self._replica, homes))
            keys = [self._names.home(digest) for digest, _ in taken]
            arguments = wire.bind_arguments(homes, idle_seconds=self._homes.idle_seconds)
            if await self._is_taken("bind", evaluate(redis, wire.BIND, keys, arguments)) is None:
                self._homes.not_told(taken)

    async def _sync(self, redis: Redis, registry: Registry) -> None:
        """Exchange what was done with workers, here and at the others."""
        self._has_deeds = False
        now = self._clock()
        told = self._workers.deeds()
        arguments = wire.workers_arguments(
            self._workers.entries(told, now=now),
            lease_seconds=_WORKER_LEASE_SECONDS,
            removal_seconds=_REMOVAL_LEASE_SECONDS,
        )
        reply = await self._is_taken("workers", evaluate(redis, wire.WORKERS, [self._names.workers], arguments))
        if reply is None:
            return
        try:
            changes, bad = self._workers.merge(told, wire.read_workers(reply), now=now)
        except WireError as error:
            self._count("workers", error)
            return
        for name in bad:
            self._count("workers", WireError(f"the record of the worker {name} cannot be read"))
            self._log.warning("a worker that Redis holds cannot be read", worker=name)
        self._is_carrying_out = True
        try:
            refused = await carry_out(registry, changes)
        finally:
            self._is_carrying_out = False
        for name, reason in refused.items():
            self._workers.refuse(name)
            self._log.warning("a worker of another replica cannot be registered here", worker=name, reason=str(reason))
        if any(deed.stamp_ms is None for deed in told.values()):
            await self._say(redis, wire.WorkersChanged(self._replica))

    async def _is_taken(self, operation: str, writing: Awaitable[_T]) -> _T | None:
        """What Redis answers; None if it lives but does not take it."""
        try:
            answer = await writing
        except exceptions.ResponseError as error:
            self._count(operation, error)
            self._refused.add(operation)
            return None
        if operation in self._refused:
            self._refused.discard(operation)
            self._homes.tell_again()
        return answer

    # --- looking up -------------------------------------------------------------------------------------

    async def _answer(self, redis: Redis) -> None:
        """Ask Redis for what requests want to know, many at a time."""
        try:
            await redis.time()
            self._can_answer = True
            while goes_on():
                await self._asked.wait()
                self._asked.clear()
                while self._asks and goes_on():
                    await self._ask(redis, list(islice(self._asks, _BATCH)))
        finally:
            self._can_answer = False
            self._asking_since = None
            for ask in self._asks.values():
                ask.cancel()
            self._asks.clear()

    async def _ask(self, redis: Redis, digests: Sequence[bytes]) -> None:
        self._asking_since = self._clock()
        pipeline = redis.pipeline(transaction=False)
        pipeline.time()
        pipeline.mget([self._names.home(digest) for digest in digests])
        (seconds, microseconds), values = await pipeline.execute()
        self._asking_since = None
        now, now_ms = self._clock(), seconds * 1000 + microseconds // 1000
        for digest, value in zip(digests, values, strict=True):
            try:
                if value is None:
                    self._homes.confirm(digest, now=now)
                else:
                    self._hear_home(wire.read_home(digest, value, now_ms=now_ms), now=now)
            except WireError as error:
                self._count("look_up", error)
            self._asks.pop(digest).set_result(None)
