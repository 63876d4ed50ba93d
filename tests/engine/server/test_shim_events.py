"""The event stream of running shims over real sockets: live, replayed and as a snapshot, one truth."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest
import zmq
from shim_process import SIM, ShimProcess, running_shim, wait_until

from router.wire.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    decode_batch,
    decode_sequence,
    decode_snapshot,
    decode_sources,
)

Frames = tuple[bytes, bytes, bytes]


@dataclass(slots=True)
class Listener:
    """A subscriber of one rank, and what it heard."""

    live: zmq.Socket
    replay_endpoint: str
    heard: list[Frames]

    def drain(self, *, quiet_seconds: float = 0.15) -> list[Frames]:
        while self.live.poll(int(quiet_seconds * 1000)):
            self.heard.append(tuple(self.live.recv_multipart()))
        return self.heard

    def all(self) -> list[Frames]:
        """What it heard, once that is all that was published."""
        last = self.replay(0)[-1]
        while self.heard[-1] != last:
            assert self.live.poll(20_000), "a message that can be replayed was not heard"
            self.heard.append(tuple(self.live.recv_multipart()))
        return self.heard

    def replay(self, first: int) -> list[Frames]:
        """Ask as vLLM's subscribers do, with a plain DEALER."""
        messages = []
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.connect(self.replay_endpoint)
            dealer.send_multipart([b"", first.to_bytes(8, "big")])
            while True:
                assert dealer.poll(20_000), "no answer to a replay request"
                empty, *frames = dealer.recv_multipart()
                assert empty == b""
                if frames == [b"", b"\xff" * 8, b""]:
                    return messages
                messages.append(tuple(frames))


@pytest.fixture(scope="module")
def shim() -> Iterator[ShimProcess]:
    """Two ranks with caches of 30 pages, which must evict."""
    sizes = ("--page-tokens", "8", "--pool-tokens", "240", "--window-pool-tokens", "200")
    with running_shim(*SIM, "--dp-size", "2", *sizes) as shim:
        yield shim


@pytest.fixture
def client(shim: ShimProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=shim.url, timeout=60) as client:
        yield client


@pytest.fixture
def listener(client: httpx.Client) -> Iterator[Listener]:
    """Hears rank 0 from some message on: a subscription takes a moment to reach the publisher."""
    source = decode_sources(client.get("/kv_event_sources").json())[0]
    with zmq.Context() as context, context.socket(zmq.SUB) as live:
        live.subscribe(source.topic.encode())
        live.connect(source.endpoint)
        listener = Listener(live, source.replay_endpoint, [])
        token = iter(range(300, 1300, 8))

        def is_heard() -> bool:
            first = next(token)
            complete(client, list(range(first, first + 8)))
            return bool(listener.drain(quiet_seconds=0.05))

        wait_until(is_heard)
        yield listener


def complete(client: httpx.Client, prompt: list[int], *, rank: int = 0, salt: str | None = None) -> None:
    body = {"prompt": prompt, "max_tokens": 3, "routed_dp_rank": rank, "cache_salt": salt, "ignore_eos": True}
    assert client.post("/v1/completions", json=body).status_code == 200


def traffic(client: httpx.Client, *, requests: int, seed: int) -> None:
    """Conversations that share heads, under two salts, more than the caches hold."""
    rng = random.Random(seed)
    heads = [[rng.randrange(300, 2000) for _ in range(40)] for _ in range(6)]
    for _ in range(requests):
        tail = [rng.randrange(300, 2000) for _ in range(rng.randrange(1, 60))]
        complete(client, rng.choice(heads)[: rng.randrange(8, 41)] + tail, salt=rng.choice([None, "tenant"]))


def apply(held: Counter, batch: EventBatch) -> None:
    """Residency by counting copies per group, as a consumer must."""
    for event in batch.events:
        match event:
            case BlockStored():
                held.update((event.group, value) for value in event.hashes)
            case BlockRemoved():
                held.subtract((event.group, value) for value in event.hashes)
            case AllBlocksCleared():
                held.clear()
    assert all(count in (0, 1) for count in held.values()), "one copy of a block, removed once"


def residency(messages: list[Frames]) -> set:
    held: Counter = Counter()
    for _, _, payload in messages:
        apply(held, decode_batch(payload))
    return set(+held)


def test_live_replay_and_snapshot_agree(client: httpx.Client, listener: Listener) -> None:
    """After evictions: the replay repeats the live bytes, and the snapshot holds what following them gives."""
    traffic(client, requests=60, seed=1)
    live = listener.all()
    replayed = listener.replay(0)
    first = decode_sequence(live[0][1])
    assert replayed[first:] == live
    assert [decode_sequence(frames[1]) for frames in replayed] == list(range(len(replayed)))
    assert {frames[0] for frames in replayed} == {b"kv-events"}
    removals = sum(isinstance(e, BlockRemoved) for f in replayed for e in decode_batch(f[2]).events)
    assert removals > 20, "the caches had to evict"

    answer = client.get("/kv_snapshot?dp_rank=0")
    assert answer.headers["content-type"] == "application/x-msgpack"
    snapshot = decode_snapshot(answer.content)
    assert snapshot.sequence == len(replayed) - 1
    held: Counter = Counter()
    apply(held, snapshot.batch)
    assert set(+held) == residency(replayed)
    assert {group for group, _ in held} == {0, 1}, "full and window pages are both there"


def test_snapshot_while_busy_is_true_at_its_sequence(client: httpx.Client, shim: ShimProcess) -> None:
    """Snapshots taken in the midst of work equal the messages up to their number, and none beyond."""
    source = decode_sources(client.get("/kv_event_sources").json())[0]
    snapshots = []
    with httpx.Client(base_url=shim.url, timeout=60) as other:
        for seed in range(8):
            body = {"prompt": [seed * 90 + 300 + i for i in range(80)], "max_tokens": 120, "stream": True}
            body |= {"routed_dp_rank": 0, "ignore_eos": True}
            with other.stream("POST", "/v1/completions", json=body) as answer:
                for count, line in enumerate(answer.iter_lines()):
                    if line.startswith("data:") and count % 9 == 0:
                        snapshots.append(decode_snapshot(client.get(source.snapshot_path).content))
    messages = Listener(None, source.replay_endpoint, []).replay(0)
    assert len({snapshot.sequence for snapshot in snapshots}) > 8
    for snapshot in snapshots:
        held: Counter = Counter()
        apply(held, snapshot.batch)
        assert set(+held) == residency(messages[: snapshot.sequence + 1])


def test_snapshot_stores_parents_first(client: httpx.Client) -> None:
    """Every block of a snapshot names a parent that stands before it, and carries its tokens."""
    traffic(client, requests=10, seed=2)
    snapshot = decode_snapshot(client.get("/kv_snapshot").content)
    known: set = set()
    for event in snapshot.batch.events:
        assert isinstance(event, BlockStored)
        assert event.is_dense
        if event.kind == "full_attention":
            assert event.parent is None or event.parent in known
            known.update(event.hashes)
    assert known


def test_a_gap_is_filled_by_replay(client: httpx.Client, listener: Listener) -> None:
    """A subscriber that lost messages asks from the first one lost and then holds the same."""
    traffic(client, requests=20, seed=3)
    live = listener.all()
    start, end = 5, 12
    lost = [frames for frames in live if not start <= live.index(frames) < end]
    first_lost = decode_sequence(live[start][1])
    refill = listener.replay(first_lost)
    healed = {frames[1]: frames for frames in (*lost, *refill)}
    assert [healed[key] for key in sorted(healed)] == live


def test_epoch_names_the_process(client: httpx.Client, listener: Listener) -> None:
    """Every batch carries the epoch and rank that the sources name; another process has another epoch."""
    sources = client.get("/kv_event_sources").json()
    assert set(sources) == {"0", "1"}
    assert {source["epoch"] for source in sources.values()} == {sources["0"]["epoch"]}
    complete(client, [299] * 9)
    for frames in listener.all():
        batch = decode_batch(frames[2])
        assert (batch.epoch, batch.rank) == (sources["0"]["epoch"], 0)
        assert abs(batch.timestamp - time.time()) < 60
    with running_shim(*SIM) as second, httpx.Client(base_url=second.url, timeout=60) as other:
        assert other.get("/kv_event_sources").json()["0"]["epoch"] != sources["0"]["epoch"]


def test_reset_is_published_at_once(client: httpx.Client, listener: Listener) -> None:
    """A reset clears in the stream without waiting for the next request; a busy rank refuses and says nothing."""
    complete(client, list(range(700, 740)))
    before = len(listener.all())
    wait_until(lambda: client.post("/reset_prefix_cache").json() == {"success": True})
    assert len(listener.all()) == before + 1
    assert decode_batch(listener.heard[-1][2]).events == (AllBlocksCleared(),)
    snapshot = decode_snapshot(client.get("/kv_snapshot").content)
    assert snapshot.batch.events == ()
    assert snapshot.sequence == decode_sequence(listener.heard[-1][1])

    # More than the cache has room for at once: busy for two seconds, had nobody left.
    prompts = ["a b c"] * 10
    body = {"prompt": prompts, "max_tokens": 200, "stream": True, "ignore_eos": True, "routed_dp_rank": 0}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        next(lines)
        assert client.post("/reset_prefix_cache").json() == {"success": False}


def test_ranks_publish_apart(client: httpx.Client, listener: Listener) -> None:
    """What rank 1 stores is on rank 1's socket only."""
    heard = len(listener.all())
    complete(client, list(range(900, 940)), rank=1)
    assert len(listener.drain()) == heard
    source = decode_sources(client.get("/kv_event_sources").json())[1]
    messages = Listener(None, source.replay_endpoint, []).replay(0)
    stored = [e for f in messages for e in decode_batch(f[2]).events if isinstance(e, BlockStored)]
    assert any(list(event.token_ids)[:40] == list(range(900, 940)) for event in stored)
    assert {decode_batch(frames[2]).rank for frames in messages} == {1}


def test_without_events() -> None:
    """--no-kv-events publishes nothing and says so."""
    with running_shim(*SIM, "--no-kv-events") as shim, httpx.Client(base_url=shim.url, timeout=60) as client:
        assert "events" not in shim.ready
        assert decode_sources(client.get("/kv_event_sources").json()) == ()
        assert client.get("/kv_snapshot").status_code == 404
        complete(client, [300, 301])
