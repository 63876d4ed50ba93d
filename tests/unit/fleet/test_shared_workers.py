"""The register of workers: what an operator did last, at whichever replica, holds at all of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from router.errors import Conflict
from router.fleet.registry import Registry
from router.fleet.shared_workers import WorkerBook, WorkerRecord, carry_out, records
from router.settings import WorkerSpec
from router.wire.redis import WorkerEntry


@dataclass
class Entry:
    """What a registry shows of a worker."""

    spec: WorkerSpec
    is_draining: bool = False

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass
class FakeRegistry:
    """Workers by name, one a URL."""

    present: dict[str, Entry] = field(default_factory=dict)

    def workers(self) -> list[Entry]:
        return list(self.present.values())

    def add(self, spec: WorkerSpec) -> None:
        if any(spec.url == other.spec.url for other in self.present.values()):
            raise Conflict(f"{spec.url} is registered already")
        self.present[spec.name] = Entry(spec)

    async def remove(self, name: str) -> None:
        del self.present[name]

    async def change(self, *, leaving: Iterable[str], joining: Iterable[WorkerSpec]) -> dict[str, Conflict]:
        for name in leaving:
            del self.present[name]
        refused = {}
        for spec in joining:
            try:
                self.add(spec)
            except Conflict as conflict:
                refused[spec.name] = conflict
        return refused

    def drain(self, name: str) -> None:
        self.present[name].is_draining = True

    def undrain(self, name: str) -> None:
        self.present[name].is_draining = False


@dataclass
class Store:
    """The rule of the register, written anew: the later stamp stays, of one stamp the first."""

    now_ms: int = 1_000_000
    entries: dict[str, WorkerEntry] = field(default_factory=dict)

    def exchange(self, told: dict[str, WorkerEntry]) -> dict[str, WorkerEntry]:
        for name, entry in told.items():
            stamp_ms = entry.stamp_ms if entry.stamp_ms is not None else self.now_ms - round(entry.age_seconds * 1000)
            old = self.entries.get(name)
            if old is None or stamp_ms > (old.stamp_ms or 0):
                self.entries[name] = WorkerEntry(entry.record, stamp_ms)
        return dict(self.entries)


class Replica:
    """A registry and its copy of the register."""

    def __init__(self, store: Store, *configured: str) -> None:
        self.store = store
        self.registry = FakeRegistry()
        self.book = WorkerBook()
        for name in configured:
            self.registry.add(spec(name))
        self.book.configured(records(self._registry).values(), now=self.now)

    @property
    def now(self) -> float:
        return self.store.now_ms / 1000

    @property
    def _registry(self) -> Registry:
        return cast("Registry", self.registry)

    def observe(self) -> None:
        self.store.now_ms += 1
        self.book.observe(records(self._registry), now=self.now)

    async def sync(self) -> None:
        told = self.book.deeds()
        reply = self.store.exchange(self.book.entries(told, now=self.now))
        changes, bad = self.book.merge(told, reply, now=self.now)
        assert bad == []
        for name in await carry_out(self._registry, changes):
            self.book.refuse(name)

    @property
    def state(self) -> dict[str, bool]:
        return {name: entry.is_draining for name, entry in self.registry.present.items()}


def spec(name: str) -> WorkerSpec:
    return WorkerSpec(url=f"http://{name}:1", id=name)


STEP = st.tuples(
    st.sampled_from(["add", "remove", "drain", "undrain", "sync"]), st.integers(0, 2), st.sampled_from("xyz")
)


@given(st.lists(STEP, max_size=30))
async def test_in_the_end_all_replicas_have_what_was_done_last(steps: list[tuple[str, int, str]]) -> None:
    """Whatever is done wherever, with the exchanges in any order: the last deed of each worker holds everywhere."""
    store = Store()
    replicas = [Replica(store, "x"), Replica(store, "x", "y"), Replica(store)]
    last: dict[str, bool | None] = {"x": False, "y": False}
    for what, number, name in steps:
        replica = replicas[number]
        present = name in replica.registry.present
        match what:
            case "add" if not present:
                replica.registry.add(spec(name))
                last[name] = False
            case "remove" if present:
                await replica.registry.remove(name)
                last[name] = None
            case "drain" if present and not replica.state[name]:
                replica.registry.drain(name)
                last[name] = True
            case "undrain" if present and replica.state[name]:
                replica.registry.undrain(name)
                last[name] = False
            case "sync":
                await replica.sync()
        replica.observe()
    for _ in range(2):
        for replica in replicas:
            await replica.sync()
            replica.observe()
    for replica in replicas:
        assert replica.state == {name: drains for name, drains in last.items() if drains is not None}


async def test_a_replica_that_restarts_takes_back_nothing_that_was_done_meanwhile() -> None:
    """Its configuration names a worker that was removed and one that is drained."""
    store = Store()
    one = Replica(store, "x", "y", "z")
    await one.sync()
    await one.registry.remove("x")
    one.registry.drain("y")
    one.observe()
    await one.sync()
    restarted = Replica(store, "x", "y", "z")
    await restarted.sync()
    restarted.observe()
    await restarted.sync()
    await one.sync()
    assert restarted.state == one.state == {"y": True, "z": False}


async def test_replicas_configured_differently_keep_their_own_spec() -> None:
    """Nobody did anything, so nobody is right; and the two do not change each other in turns."""
    store = Store()
    one, other = Replica(store, "x"), Replica(store)
    differing = WorkerSpec(url="http://x:1", id="x", dp_size=2)
    other.registry.add(differing)
    other.book.configured(records(cast("Registry", other.registry)).values(), now=0.0)
    for _ in range(3):
        for replica in (one, other):
            await replica.sync()
            replica.observe()
    assert one.registry.present["x"].spec == spec("x")
    assert other.registry.present["x"].spec == differing


async def test_a_worker_that_cannot_be_registered_here_is_not_removed_elsewhere() -> None:
    """Its URL is another worker's here."""
    store = Store()
    one, other = Replica(store), Replica(store)
    other.registry.add(WorkerSpec(url="http://x:1", id="other-name"))
    other.book.configured(records(cast("Registry", other.registry)).values(), now=0.0)
    one.registry.add(spec("x"))
    one.observe()
    for _ in range(3):
        for replica in (one, other):
            await replica.sync()
            replica.observe()
    assert "x" in one.state
    assert "x" not in other.state
    assert "other-name" in other.state


async def test_a_deed_during_an_exchange_is_not_lost() -> None:
    """The worker is removed here while the store's answer is under way."""
    store = Store()
    one = Replica(store, "x")
    told = one.book.deeds()
    reply = store.exchange(one.book.entries(told, now=one.now))
    await one.registry.remove("x")
    one.observe()
    assert one.book.merge(told, reply, now=one.now) == ({}, [])
    await one.sync()
    assert store.entries["x"].record == ""


def test_a_record_that_cannot_be_read_is_named_and_the_others_are_taken() -> None:
    """Written by another version, say."""
    book = WorkerBook()
    good = WorkerRecord(spec=spec("x"))
    reply = {"bad": WorkerEntry("{", 5), "x": WorkerEntry(good.model_dump_json(), 5)}
    assert book.merge({}, reply, now=0.0) == ({"x": good}, ["bad"])
    assert book.deeds()["x"].record == good
    assert "bad" not in book.deeds()


def test_what_cannot_be_read_is_named_once_while_it_is_there() -> None:
    """Every exchange shows it anew; one that was mended and breaks again is news again."""
    book = WorkerBook()
    good = WorkerEntry(WorkerRecord(spec=spec("x")).model_dump_json(), 5)
    broken = WorkerEntry("{", 6)
    named = [
        book.merge(book.deeds(), reply, now=0.0)[1]
        for reply in ({"w": None}, {"w": None, "x": broken}, {"w": None, "x": broken}, {"x": good}, {"w": None})
    ]
    assert named == [["w"], ["x"], [], [], ["w"]]
