"""Decodes that go on step after step attend as if all were gathered anew, whatever happens between the steps."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from engine_shim.attention import paged
from engine_shim.attention.going_on import Succession
from engine_shim.attention.paged import PagedAttention, Pools
from engine_shim.attention.plan import make_plan
from engine_shim.types import Batch, CacheGroup, CacheLayout, Chunk, GroupKind, Request, Sampling

PAGE, PAGES, LONGEST = 4, 800, 420
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
SCALE = 0.5
CPU = torch.device("cpu")


class Sequence:
    """A sequence of any length up to ``LONGEST``: what it is made of, and where it lies."""

    def __init__(self, rank: Rank, length: int) -> None:
        self.request = Request(id="", prompt=(0,) * LONGEST, sampling=Sampling(max_tokens=1))
        self.query = torch.randn(LONGEST, HEADS, HEAD_DIM, dtype=torch.float64)
        self.key, self.value = torch.randn(2, LONGEST, KV_HEADS, HEAD_DIM, dtype=torch.float64)
        self.length = 0
        self.table: list[int] = []
        rank.place(self, length)

    def expected(self) -> Tensor:
        """The newest query over all keys, one head at a time."""
        heads = []
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            scores = self.key[: self.length, shared] @ self.query[self.length - 1, head] * SCALE
            heads.append(scores.softmax(0) @ self.value[: self.length, shared])
        return torch.stack(heads)


class Rank:
    """One layer's pool, where all that belongs to nobody is NaN."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.free = random.Random(seed).sample(range(1, PAGES), PAGES - 1)
        self.layout = CacheLayout(
            page_tokens=PAGE, groups=(CacheGroup(index=0, kind=GroupKind.FULL, layers=(0,)),), pages=(PAGES,)
        )
        self.pools = Pools.allocate(self.layout, kv_heads=KV_HEADS, head_dim=HEAD_DIM, device=CPU, dtype=torch.float64)
        self.keys, self.values = self.pools.keys[0][0], self.pools.values[0][0]
        self.keys.fill_(torch.nan)
        self.values.fill_(torch.nan)
        self.succession = Succession()

    def place(self, sequence: Sequence, length: int) -> None:
        """Give pages for as many tokens, all of them computed."""
        self.grow(sequence, length)
        for position in range(length):
            at = sequence.table[position // PAGE], position % PAGE
            self.keys[at], self.values[at] = sequence.key[position], sequence.value[position]
        sequence.length = length

    def grow(self, sequence: Sequence, length: int) -> None:
        while len(sequence.table) * PAGE < length:
            sequence.table.append(self.free.pop())

    def release(self, sequence: Sequence) -> None:
        """Its pages are the next to be handed out, in the same order."""
        self.keys[sequence.table], self.values[sequence.table] = torch.nan, torch.nan
        self.free += reversed(sequence.table)
        sequence.table, sequence.length = [], 0

    def move(self, sequence: Sequence, number: int) -> None:
        """Another page takes a page's place, with the same content."""
        old, new = sequence.table[number], self.free.pop()
        self.keys[new], self.values[new] = self.keys[old], self.values[old]
        sequence.table[number] = new
        self.keys[old], self.values[old] = torch.nan, torch.nan
        self.free.insert(0, old)

    def decode(self, sequences: list[Sequence]) -> None:
        """One token more of each; what is attended is compared."""
        chunks = []
        for sequence in sequences:
            self.grow(sequence, sequence.length + 1)
            tables = (tuple(sequence.table),)
            chunks.append(Chunk(sequence.request, sequence.length, 1, tables, samples=True, draws=0))
            sequence.length += 1
        plan = make_plan(Batch(tuple(chunks)), self.layout, device=CPU, dtype=torch.float64, succession=self.succession)
        query, key, value = (
            torch.stack([getattr(sequence, part)[sequence.length - 1] for sequence in sequences])
            for part in ("query", "key", "value")
        )
        attended = PagedAttention(self.pools, plan, scale=SCALE)(0, query, key, value)
        torch.testing.assert_close(attended, torch.stack([sequence.expected() for sequence in sequences]))


@given(
    lengths=st.lists(st.integers(1, 300), min_size=2, max_size=5),
    happens=st.lists(
        st.sampled_from(("", "", "", "move", "again", "elsewhere", "other", "fewer", "turn")), max_size=25
    ),
    steps=st.integers(1, 4),
    room=st.sampled_from((1, 3, 64)),
    limit=st.sampled_from((0, 60_000, 1 << 28)),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=60, deadline=None)
def test_whatever_happens(lengths: list[int], happens: list[str], steps: int, room: int, limit: int, seed: int) -> None:
    """Pages change places, sequences begin again, give their pages to others, sit out a step or change rows."""
    rng = random.Random(seed)
    rank = Rank(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged, "_ROOM_TOKENS", room)
        patch.setattr(paged, "_KEPT_BYTES", limit)
        running = [Sequence(rank, length) for length in lengths]
        for event in happens:
            chosen = rng.choice(running)
            length = chosen.length
            match event:
                case "move":
                    rank.move(chosen, rng.randrange(len(chosen.table)))
                case "again":  # on the pages it had
                    rank.release(chosen)
                    rank.place(chosen, rng.choice((length, length + 1, max(1, length - 1))))
                case "elsewhere":
                    rank.release(chosen)
                    rng.shuffle(rank.free)
                    rank.place(chosen, length)
                case "other":  # on the pages of one that is gone, as long as that was
                    rank.release(chosen)
                    running[running.index(chosen)] = Sequence(rank, length)
                case "fewer":
                    rank.decode([sequence for sequence in running if sequence is not chosen])
                case "turn":
                    running.append(running.pop(0))
            for _ in range(steps):
                rank.decode(running)


def test_keeps() -> None:
    """From the third step on old pages are not read again, until one of them is another."""
    rank = Rank(0)
    running = [Sequence(rank, length) for length in (30, 30, 17)]
    for _ in range(3):
        rank.decode(running)
    old = running[0].table[1]
    keys = rank.keys[old].clone()
    rank.keys[old] = torch.nan
    rank.decode(running)
    rank.move(running[1], 0)
    with pytest.raises(AssertionError, match="not close"):
        rank.decode(running)
    rank.keys[old] = keys
    rank.decode(running)


def test_apart() -> None:
    """A segment that begins in front of one that goes on takes nothing of it."""
    rank = Rank(0)
    long, short = Sequence(rank, 300), Sequence(rank, 20)
    for _ in range(3):
        rank.decode([long])
    for _ in range(4):
        rank.decode([short, long])


def test_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What would be more than a rank may keep is read from its pages at every step."""
    monkeypatch.setattr(paged, "_KEPT_BYTES", 10_000)
    rank = Rank(0)
    running = [Sequence(rank, 30), Sequence(rank, 30)]
    for _ in range(4):
        rank.decode(running)
    rank.keys[running[0].table[1]] = torch.nan
    with pytest.raises(AssertionError, match="not close"):
        rank.decode(running)
