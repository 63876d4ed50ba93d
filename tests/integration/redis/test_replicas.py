"""Two routers, two shims of two ranks and one Redis under load, while one of them is frozen, filled or killed."""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field

import httpx
import pytest
import pytest_asyncio

from tests.fakes.router_cluster import Cluster, Part, needs_redis, rank, start, until

pytestmark = [needs_redis, pytest.mark.asyncio(loop_scope="module")]

BLOCK_TOKENS = 16
#: 408 tokens of the needle model.
PROMPT = " ".join(f"key-{number:04d} val-{number:04d}" for number in range(204))
TURNS_COMPARED = 60
_sessions = itertools.count()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster() -> AsyncIterator[Cluster]:
    async with Cluster() as running:
        yield running


@dataclass
class Turn:
    """One answered request of the load."""

    at: float
    prompt_tokens: int
    cached_tokens: int
    possible_tokens: int


@dataclass
class Load:
    """Conversations that grow by a turn at a time and change replica with every turn.

    The client behaves as a load balancer does: a request that a replica has not begun to answer goes to the other.
    """

    cluster: Cluster
    turns: list[Turn] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    broken_off: int = 0
    _stopping: bool = False

    async def run(self, *, lanes: int = 8) -> None:
        await asyncio.gather(*(self._lane(lane) for lane in range(lanes)))

    def stop(self) -> None:
        self._stopping = True

    async def answered(self, more: int) -> None:
        """Wait until so many more turns have been answered."""
        enough = len(self.turns) + more
        async with asyncio.timeout(60):
            while len(self.turns) < enough:  # noqa: ASYNC110 - no event for the n-th turn
                await asyncio.sleep(0.02)

    async def _lane(self, lane: int) -> None:
        while not self._stopping:
            await self._conversation(f"load-{lane}-{next(_sessions)}", first=lane)

    async def _conversation(self, session: str, *, first: int) -> None:
        prompt = f"{session} {PROMPT}"
        held_tokens = 0
        for turn in range(12):
            if self._stopping:
                return
            answer = await self._ask(prompt, session, first=first + turn)
            if answer is None:
                continue
            usage = answer["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            if turn:
                self.turns.append(Turn(time.monotonic(), usage["prompt_tokens"], cached, held_tokens))
            held_tokens = usage["prompt_tokens"] // BLOCK_TOKENS * BLOCK_TOKENS
            prompt += " " + " ".join(f"key-{turn:04d} val-{number:04d}" for number in range(16))
            await asyncio.sleep(0.02)

    async def _ask(self, prompt: str, session: str, *, first: int) -> dict[str, object] | None:
        body = {"model": "needle", "prompt": prompt, "max_tokens": 4, "ignore_eos": True}
        replicas = self.cluster.routers
        for number in range(len(replicas)):
            router = replicas[(first + number) % len(replicas)]
            began = False
            try:
                request = self.cluster.http.build_request(
                    "POST", router.words["data"] + "/v1/completions", json=body, headers={"x-session-id": session}
                )
                answer = await self.cluster.http.send(request, stream=True)
                began = True
                await answer.aread()
            except httpx.TransportError as error:
                if began:
                    self.broken_off += 1
                    return None
                if number + 1 == len(replicas):
                    self.failures.append(repr(error))
                continue
            if answer.status_code != 200:
                self.failures.append(answer.text)
                return None
            return answer.json()
        return None

    def hit_ratio(self, *, since: float, until: float) -> float:
        """Reused tokens over what the turn before had left to reuse."""
        turns = [turn for turn in self.turns if since <= turn.at < until]
        assert len(turns) >= TURNS_COMPARED
        return sum(turn.cached_tokens for turn in turns) / sum(turn.possible_tokens for turn in turns)


async def disturb(
    cluster: Cluster, disturbance: Callable[[], Awaitable[None]], *, within_seconds: float = 3.0
) -> tuple[Load, float, float]:
    """Run load, do something, and compare the hit ratio before with that from ``within_seconds`` after it."""
    load = Load(cluster)
    running = asyncio.ensure_future(load.run())
    try:
        await load.answered(TURNS_COMPARED)
        disturbed_at = time.monotonic()
        await disturbance()
        await asyncio.sleep(max(0.0, disturbed_at + within_seconds - time.monotonic()))
        await load.answered(TURNS_COMPARED)
    finally:
        load.stop()
        await running
    before = load.hit_ratio(since=0.0, until=disturbed_at)
    after = load.hit_ratio(since=disturbed_at + within_seconds, until=time.monotonic())
    print(f"hit ratio before {before:.4f} after {after:.4f}, {len(load.turns)} turns, {load.broken_off} broken off")
    return load, before, after


async def test_a_session_that_alternates_between_replicas_keeps_its_rank(cluster: Cluster) -> None:
    """Each turn at the other replica: the rank of the first, by home, with all of the last turn reused."""
    for session in range(8):
        name, prompt = f"alternating-{session}", f"{session} {PROMPT}"
        first = answer = await cluster.ask(cluster.routers[0], prompt, name)
        for turn in range(4):
            prompt += " key-0001"
            answer = await cluster.ask_again(cluster.routers[(turn + 1) % 2], prompt, name, after=answer)
            assert rank(answer) == rank(first)
            assert answer.headers["x-homing-reason"] == "home"
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 400
    used = {rank(await cluster.ask(cluster.routers[0], f"{n} {PROMPT}", f"alternating-{n}")) for n in range(8)}
    assert len(used) > 1, "the sessions are spread"


@pytest.mark.parametrize("is_frozen", [False, True], ids=["up", "frozen"])
async def test_new_sessions_that_reach_both_replicas_at_once_are_agreed_on(cluster: Cluster, is_frozen: bool) -> None:
    """The first two requests of a session, one at each replica at once, go to one of four ranks: by its hash.

    Not always: a replica that sees much more load somewhere than the other does decides by load. By chance it would be
    one in four.
    """
    if is_frozen:
        cluster.redis.send(signal.SIGSTOP)
        for router in cluster.routers:
            await until(lambda router=router: cluster.is_down(router))
    agreed = 0
    try:
        for session in range(16):
            name = f"once-{is_frozen}-{session}"
            asked = (cluster.ask(router, f"{name} {PROMPT}", name) for router in cluster.routers)
            one, other = await asyncio.gather(*asked)
            agreed += rank(one) == rank(other)
            await asyncio.sleep(0.25)
    finally:
        cluster.redis.send(signal.SIGCONT)
    assert agreed >= 9
    for router in cluster.routers:
        await until(lambda router=router: cluster.is_up(router))


async def test_a_frozen_redis_harms_nobody(cluster: Cluster) -> None:
    """Redis stands still for two seconds in mid-load: nothing fails, the metric says so, then all is as before."""
    seen: list[float] = []

    async def freeze() -> None:
        cluster.redis.send(signal.SIGSTOP)
        await asyncio.sleep(2)
        seen.append(await cluster.metric(cluster.routers[0], "shared_state_up"))
        cluster.redis.send(signal.SIGCONT)

    load, before, after = await disturb(cluster, freeze)
    assert load.failures == []
    assert seen == [0.0]
    assert after >= before - 0.02
    for router in cluster.routers:
        await until(lambda router=router: cluster.is_up(router))


async def test_a_redis_that_is_killed_and_comes_back_empty_harms_nobody(cluster: Cluster) -> None:
    """Killed in mid-load, back after a second with nothing: homes and workers are told to it again."""
    early = await cluster.ask(cluster.routers[0], f"early {PROMPT}", "early")

    async def replace() -> None:
        cluster.redis.kill()
        await until(lambda: cluster.is_down(cluster.routers[0]))
        cluster.redis.start()

    load, before, after = await disturb(cluster, replace)
    assert load.failures == []
    assert after >= before - 0.02
    for router in cluster.routers:
        await until(lambda router=router: cluster.is_up(router))
    with cluster.redis.client() as client:

        async def has_all() -> bool:
            return client.hlen("homing:workers") == 2 and len(client.keys("homing:home:*")) >= len(load.turns) // 12

        await until(has_all)
    late = await cluster.ask_again(cluster.routers[1], f"early {PROMPT} key-0001", "early", after=early)
    assert rank(late) == rank(early)


async def test_a_full_redis_harms_nobody(cluster: Cluster) -> None:
    """Redis refuses every write: nothing fails, sessions still come home over the news, and the metric says so."""
    with cluster.redis.client() as client:

        async def fill() -> None:
            client.config_set("maxmemory", 1)

        try:
            load, before, after = await disturb(cluster, fill, within_seconds=0.5)
            assert load.failures == []
            assert after >= before - 0.02
            assert await cluster.metric(cluster.routers[0], "shared_state_up") == 0.0
            assert await cluster.metric(cluster.routers[0], "shared_state_errors_total", trouble="full") > 0
            first = await cluster.ask(cluster.routers[0], f"full {PROMPT}", "full")
            second = await cluster.ask_again(cluster.routers[1], f"full {PROMPT} key-0001", "full", after=first)
            assert (rank(second), second.headers["x-homing-reason"]) == (rank(first), "home")
        finally:
            client.config_set("maxmemory", 0)
    for router in cluster.routers:
        await until(lambda router=router: cluster.is_up(router))


async def test_forgotten_scripts_are_sent_again(cluster: Cluster) -> None:
    """SCRIPT FLUSH in mid-load: nothing fails, and homes are still written."""
    with cluster.redis.client() as client:

        async def flush() -> None:
            client.script_flush()
            client.flushdb()

        load, before, after = await disturb(cluster, flush, within_seconds=0.5)
        assert load.failures == []
        assert after >= before - 0.02
        assert client.keys("homing:home:*")
    await until(lambda: cluster.is_up(cluster.routers[0]))


async def test_what_operators_do_with_workers_at_one_replica_holds_at_all(cluster: Cluster) -> None:
    """A replica without workers gets those of the others; drains, removals and registrations at it reach them."""
    (third,) = await cluster.add_routers(1, workers=[])
    try:
        await until(lambda: cluster.is_ready(third, ranks=4))
        url = cluster.shim_urls[1]
        name = url.removeprefix("http://")
        other = cluster.routers[0]

        async def state(router: Part) -> list[bool]:
            return [worker["draining"] for worker in await cluster.workers(router) if worker["id"] == name]

        async def is_state(router: Part, wanted: list[bool]) -> bool:
            return await state(router) == wanted

        await cluster.http.post(f"{third.words['admin']}/admin/workers/{name}/drain")
        await until(lambda: is_state(other, [True]))
        await cluster.http.post(f"{other.words['admin']}/admin/workers/{name}/undrain")
        await until(lambda: is_state(third, [False]))
        await cluster.http.delete(f"{third.words['admin']}/admin/workers/{name}")
        await until(lambda: is_state(other, []))
        await cluster.http.post(f"{third.words['admin']}/admin/workers", json={"url": url})
        await until(lambda: is_state(other, [False]))
        for router in cluster.routers:
            await until(lambda router=router: cluster.is_ready(router, ranks=4))
    finally:
        cluster.routers.remove(third)
        third.kill()


async def test_a_drained_workers_sessions_move_with_their_next_turns(cluster: Cluster) -> None:
    """Eight sessions on two workers, which ask at both replicas at once: after two turns each, and one more, none is on
    the drained worker, and all have their caches where they are.
    """
    names = [f"moving-{number}" for number in range(8)]
    answers = {name: await cluster.ask(cluster.routers[0], f"{name} {PROMPT}", name) for name in names}
    drained = rank(answers[names[0]]).rpartition("/")[0]
    url = f"{cluster.routers[0].words['admin']}/admin/workers/{drained}"
    await cluster.http.post(f"{url}/drain")
    try:
        await until(lambda: drains(cluster, drained))
        for turn in range(2):
            more = " key-0001" * (turn + 1)
            await asyncio.gather(
                *(
                    cluster.ask(cluster.routers[number % 2], f"{name} {PROMPT}{more}", name)
                    for number, name in enumerate(names)
                )
            )
        last = [await cluster.ask(cluster.routers[1], f"{name} {PROMPT} key-0001 key-0002", name) for name in names]
        assert all(rank(answer).rpartition("/")[0] != drained for answer in last)
        again = [
            await cluster.ask_again(cluster.routers[0], f"{name} {PROMPT} key-0001 key-0003", name, after=answer)
            for name, answer in zip(names, last, strict=True)
        ]
        assert [rank(answer) for answer in again] == [rank(answer) for answer in last]
        assert all(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 400 for answer in again)
    finally:
        await cluster.http.post(f"{url}/undrain")


async def drains(cluster: Cluster, worker: str) -> bool:
    """Every replica knows that the worker is drained."""
    states = [one for router in cluster.routers for one in await cluster.workers(router) if one["id"] == worker]
    return all(one["draining"] for one in states)


async def test_a_router_that_knows_nothing_finds_the_sessions_of_another(cluster: Cluster) -> None:
    """A third router without Redis, as after a restart: 24 sessions at once, each to where its cache is."""
    prompts = [f"restart-{number} " + PROMPT for number in range(24)]

    async def ask(router: Part, more: str) -> list[httpx.Response]:
        return await asyncio.gather(
            *(cluster.ask(router, prompt + more, f"restart-{number}") for number, prompt in enumerate(prompts))
        )

    before = await ask(cluster.routers[0], "")
    workers = [word for url in cluster.shim_urls for word in ("--worker", url)]
    restarted = start("router", "--port", "0", "--admin-port", "0", *workers)
    try:
        await restarted.ready()
        await until(lambda: cluster.is_ready(restarted, ranks=4))
        await until(lambda: knows_as_much(cluster, restarted))
        after = await ask(restarted, " key-0001 val-0002")
    finally:
        restarted.kill()
    assert [rank(answer) for answer in after] == [rank(answer) for answer in before]
    assert all(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] >= 400 for answer in after)


async def knows_as_much(cluster: Cluster, router: Part) -> bool:
    """Its index has what the first router's has."""
    told = [await cluster.metric(each, "index_blocks") for each in (router, cluster.routers[0])]
    return told[0] >= told[1] > 0


async def test_a_killed_replica_takes_nothing_with_it(cluster: Cluster) -> None:
    """Killed in mid-load: what it had not begun to answer is answered by the other, with the same hits as before."""
    killed = cluster.routers[0]

    async def kill() -> None:
        killed.kill()
        await until(lambda: is_alone(cluster))

    load, before, after = await disturb(cluster, kill)
    assert load.failures == []
    assert after >= before - 0.02
    cluster.routers.remove(killed)


async def test_without_redis_for_good_sessions_are_found_by_their_caches() -> None:
    """Killed in mid-load and not coming back: the hit ratio of sessions that change replica is what it was in 5 s."""
    async with Cluster() as lone:

        async def kill() -> None:
            lone.redis.kill()

        load, before, after = await disturb(lone, kill, within_seconds=5.0)
        assert load.failures == []
        assert after >= before - 0.02
        for router in lone.routers:
            assert await lone.metric(router, "shared_state_up") == 0.0


async def is_alone(cluster: Cluster) -> bool:
    return await cluster.metric(cluster.routers[1], "shared_state_replicas") == 1.0
