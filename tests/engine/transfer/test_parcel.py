"""Pages that go from one cache to another: each arrives as what it was, under its own prefix, or not at all."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

import msgspec
import pytest
import torch

from engine_shim.attention.buffers import TensorPages
from engine_shim.cache.component import Component
from engine_shim.cache.events import EventRecorder
from engine_shim.cache.integrity import IntegrityError, check_integrity
from engine_shim.cache.radix import RadixCache
from engine_shim.transfer import parcel
from engine_shim.transfer.parcel import Parcel, Run, known_pages, layout_name, pack, unpack
from engine_shim.types import NULL_PAGE, CacheGroup, CacheLayout, GroupKind

PAGE = 4
FULL = CacheGroup(0, GroupKind.FULL, (1,))
WINDOW = CacheGroup(1, GroupKind.WINDOW, (0,), 7)  # two pages before a boundary
STATE = CacheGroup(2, GroupKind.STATE, (2,))
LAYOUTS = {
    "full": (FULL,),
    "window": (FULL, WINDOW),
    "state": (FULL, CacheGroup(1, GroupKind.STATE, (2,))),
    "draft": (FULL, CacheGroup(1, GroupKind.DRAFT, (3,))),
    "all": (FULL, WINDOW, STATE),
    "all with draft": (FULL, WINDOW, STATE, CacheGroup(3, GroupKind.DRAFT, (3,))),
}
Name = tuple[str, tuple[int, ...]]


class Rank:
    """A cache whose pages hold, as bytes, the tokens up to their end and the group: what a forward pass would make."""

    contents = "tokens"

    def __init__(self, groups: tuple[CacheGroup, ...], pages: int = 40) -> None:
        self.layout = CacheLayout(PAGE, groups, (pages,) * len(groups))
        self.cache = RadixCache(self.layout, EventRecorder(self.layout))
        self.pages: dict[tuple[int, int], bytes] = {}

    def read(self, group: int, page: int) -> bytes:
        assert page != NULL_PAGE
        return self.pages[group, page]

    def write(self, group: int, page: int, data: bytes) -> None:
        assert page != NULL_PAGE
        self.pages[group, page] = data

    def compute(self, namespace: str, tokens: tuple[int, ...]) -> None:
        """Run a prompt of whole pages as a request would, as far as there is room, and leave it to the tree."""
        match = self.cache.match(namespace, tokens)
        receipt = self.cache.lock(match)
        pages = len(tokens) // PAGE
        tables = []
        for group, table in zip(self.layout.groups, match.tables, strict=True):
            pool = self.cache.pools[group.index]
            start = 0 if group.kind is GroupKind.STATE else match.pages
            wanted = 1 if group.kind is GroupKind.STATE else pages - match.pages
            if pool.free_pages < wanted:
                self.cache.evict(group.index, wanted - pool.free_pages)
            if pool.free_pages < wanted:
                for other, taken in zip(self.cache.pools, tables, strict=False):
                    other.free(taken[1])
                self.cache.release(receipt)
                return
            new = pool.allocate(wanted)
            for number, page in enumerate(new, start=start):
                end = len(tokens) if group.kind is GroupKind.STATE else (number + 1) * PAGE
                self.pages[group.index, page] = content(group, namespace, tokens[:end])
            tables.append(([] if group.kind is GroupKind.STATE else table[: match.pages], new))
        given = [[*old, *new] for old, new in tables]
        for pool, twins in zip(self.cache.pools, self.cache.insert(namespace, tokens, given), strict=True):
            pool.free(twins)
        self.cache.release(receipt)

    def check(self) -> None:
        """The cache agrees with itself, and every page that can be read holds what it should."""
        check_integrity(self.cache, held=[[] for _ in self.cache.pools], receipts=())

    def check_prompt(self, namespace: str, prompt: tuple[int, ...]) -> int:
        """What can be reused of a prompt is what computing it would have left there."""
        match = self.cache.match(namespace, prompt)
        for group, table in zip(self.layout.groups, match.tables, strict=True):
            if group.kind is GroupKind.STATE:
                if match.pages:
                    expected = content(group, namespace, prompt[: match.pages * PAGE])
                    assert self.pages[group.index, table[0]] == expected
                continue
            for number, page in enumerate(table[: match.pages]):
                if page != NULL_PAGE:
                    expected = content(group, namespace, prompt[: (number + 1) * PAGE])
                    assert self.pages[group.index, page] == expected
        return match.pages


def content(group: CacheGroup, namespace: str, tokens: tuple[int, ...]) -> bytes:
    return f"{group.index} {namespace} {tokens}".encode()


def send(sender: Rank, receiver: Rank, namespace: str, prompt: tuple[int, ...]) -> tuple[Parcel, int]:
    known = known_pages(receiver.cache, namespace, prompt)
    parcel = pack(sender.cache, sender, namespace, prompt, model="m", cached_tokens=0).without(known)
    return parcel, unpack(receiver.cache, receiver, namespace, prompt, parcel).pages


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
def test_a_prompt_arrives_whole(groups: tuple[CacheGroup, ...]) -> None:
    """All pages before the last token can be reused by the receiver as by the sender."""
    sender, receiver = Rank(groups), Rank(groups)
    prompt = tuple(range(10 * PAGE))
    sender.compute("", prompt[: 9 * PAGE])
    _, pages = send(sender, receiver, "", (*prompt, 99))
    assert pages == receiver.check_prompt("", prompt) == 9
    receiver.check()


def test_what_the_receiver_holds_is_not_sent() -> None:
    """Of ten pages with six known, four go over; of a window the two before the end always do."""
    sender, receiver = Rank(LAYOUTS["window"]), Rank(LAYOUTS["window"])
    prompt = tuple(range(10 * PAGE + 1))
    sender.compute("", prompt[: 10 * PAGE])
    receiver.compute("", prompt[: 6 * PAGE])
    parcel, pages = send(sender, receiver, "", prompt)
    assert [(run.start, len(run.pages)) for run in parcel.runs] == [(6, 4), (8, 2)]
    assert parcel.sent_pages == 4
    assert pages == receiver.check_prompt("", prompt) == 10
    receiver.check()


def test_what_a_draft_head_has_goes_with_the_full_pages() -> None:
    """Of ten pages with six known four of each go over."""
    sender, receiver = Rank(LAYOUTS["draft"]), Rank(LAYOUTS["draft"])
    prompt = tuple(range(10 * PAGE + 1))
    sender.compute("", prompt[: 10 * PAGE])
    receiver.compute("", prompt[: 6 * PAGE])
    parcel, pages = send(sender, receiver, "", prompt)
    assert [(run.start, len(run.pages)) for run in parcel.runs] == [(6, 4), (6, 4)]
    assert pages == receiver.check_prompt("", prompt) == 10
    receiver.check()


def test_a_receiver_that_lost_the_beginning_takes_nothing() -> None:
    """The rest of a prompt whose head was evicted meanwhile cannot be entered."""
    sender, receiver = Rank(LAYOUTS["full"]), Rank(LAYOUTS["full"])
    prompt = tuple(range(10 * PAGE + 1))
    sender.compute("", prompt[: 10 * PAGE])
    receiver.compute("", prompt[: 6 * PAGE])
    parcel = pack(sender.cache, sender, "", prompt, model="m", cached_tokens=0).without(6)
    receiver.cache.evict(0, 2)
    entered = unpack(receiver.cache, receiver, "", prompt, parcel)
    assert (entered.pages, entered.tables) == (4, ())
    receiver.check()


def test_a_full_cache_makes_room_or_takes_nothing() -> None:
    """Others' pages go; a pool that is too small for the prompt stays as it is but for what was evicted."""
    sender = Rank(LAYOUTS["full"])
    prompt = tuple(range(20 * PAGE + 1))
    sender.compute("", prompt[: 20 * PAGE])
    full = Rank(LAYOUTS["full"], pages=26)
    full.compute("", tuple(range(500, 500 + 20 * PAGE)))
    assert send(sender, full, "", prompt)[1] == 20
    full.check()
    small = Rank(LAYOUTS["full"], pages=11)
    assert send(sender, small, "", prompt)[1] == 0
    small.check()


@pytest.mark.parametrize("groups", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("seed", range(12))
def test_any_traffic(groups: tuple[CacheGroup, ...], seed: int) -> None:
    """Prompts that branch, are computed and sent at random between small caches: contents always fit their prefix."""
    rng = random.Random(seed)
    ranks = [Rank(groups, pages=rng.randint(8, 40)) for _ in range(2)]
    paths: list[tuple[int, ...]] = [()]
    sent = 0
    for _ in range(120):
        stem = rng.choice(paths)
        stem = stem[: rng.randint(0, len(stem) // PAGE) * PAGE]
        prompt = stem + tuple(rng.randint(0, 2) for _ in range(rng.randint(1, 4) * PAGE))
        paths.append(prompt)
        sender, receiver = rng.sample(ranks, 2)
        namespace = rng.choice(["", "tenant"])
        sender.compute(namespace, prompt)
        parcel, pages = send(sender, receiver, namespace, (*prompt, 9))
        sent += parcel.sent_pages
        assert receiver.check_prompt(namespace, prompt) == pages
        for rank in ranks:
            rank.check()
    assert sent


def pages_one_off(patch: pytest.MonkeyPatch) -> None:
    """Contents are taken to begin one page later than they do, as behind a prefix that was counted wrong."""
    without = Run.without

    def turned(run: Run, pages: int) -> Run:
        rest = without(run, pages)
        return Run(rest.start, [*rest.pages[1:], *rest.pages[:1]], rest.is_whole)

    patch.setattr(Run, "without", turned)


def drafts_sent_from_the_start(patch: pytest.MonkeyPatch) -> None:
    """The receiver's place for the draft head's pages is counted from what it lacks, their contents are not."""
    patch.setattr(Run, "without", lambda run, pages: run)
    send = parcel.unpack

    def first_pages(cache: RadixCache, store: Rank, namespace: str, prompt: tuple[int, ...], got: Parcel) -> object:
        match = cache.match(namespace, prompt[: got.pages * PAGE])
        runs = [
            Run(run.start, run.pages[: got.pages - match.pages], run.is_whole) if run.is_whole else run
            for run in got.runs
        ]
        return send(cache, store, namespace, prompt, msgspec.structs.replace(got, runs=runs))

    patch.setitem(globals(), "unpack", first_pages)


def evicted_while_entered(patch: pytest.MonkeyPatch) -> None:
    """Room is made at the cost of what the parcel continues."""
    patch.setattr(Component, "lock", lambda self, node: node.locks.__setitem__(self.index, node.locks[self.index] + 1))


@pytest.mark.parametrize("plant", [pages_one_off, drafts_sent_from_the_start, evicted_while_entered])
def test_a_planted_bug_is_found(plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the traffic above, which passes on clean code."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError, KeyError, ValueError)):
        deque((test_any_traffic(LAYOUTS["all with draft"], seed) for seed in range(12)), maxlen=0)


def test_layouts_that_differ_have_different_names() -> None:
    """Page size, windows, groups, model and what pages are made of tell ranks apart that cannot exchange pages."""
    names = {layout_name(Rank(groups).layout, model="m", contents="c") for groups in LAYOUTS.values()}
    names.add(layout_name(Rank(LAYOUTS["all"]).layout, model="other", contents="c"))
    names.add(layout_name(Rank(LAYOUTS["all"]).layout, model="m", contents="other"))
    names.add(layout_name(CacheLayout(8, (FULL,), (40,)), model="m", contents="c"))
    assert len(names) == len(LAYOUTS) + 3


def test_pages_of_other_types_have_other_names() -> None:
    """A page is named by the type and shape of each tensor's part of it, however many pages there are."""
    kinds = [(torch.float32, 4), (torch.bfloat16, 4), (torch.bfloat16, 8)]
    pools = [[torch.zeros(2, pages, 16, width, dtype=kind) for kind, width in kinds] for pages in (3, 5)]
    three, five = ([TensorPages(((pool,),)).contents for pool in each] for each in pools)
    assert three == five
    assert len({*three}) == 3
