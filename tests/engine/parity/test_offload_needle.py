"""Needles in prefixes that come back from the host and the disk, or are longer than the device and read on the host."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from offload_rank import OffloadRank

from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.needle_text import facts, haystack
from engine_shim.model.tokenizer import ModelCard, read_card

PREFIX_TOKENS = 4000
FACTS = facts(128, seed=1)
PREFIXES = [haystack(PREFIX_TOKENS, FACTS, seed=seed) for seed in (2, 3)]


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return read_card("needle")


@pytest.fixture(scope="module")
def decoder(card: ModelCard) -> Decoder:
    return load_decoder(card)


def rank_of(decoder: Decoder, card: ModelCard, *, pool_tokens: int, **options: Any) -> OffloadRank:
    return OffloadRank(
        decoder,
        page_tokens=16,
        pool_tokens=pool_tokens,
        chunk_tokens=512,
        eos_token_ids=frozenset(card.eos_token_ids),
        record=False,
        **{"window_pool_tokens": 640, **options},
    )


@pytest.fixture(params=["host", "disk"])
def rank(request: pytest.FixtureRequest, decoder: Decoder, card: ModelCard, tmp_path: Path) -> Iterator[OffloadRank]:
    """The device has room for one prefix and a question; the host for both, or for one while the disk has both."""
    below = {"host": {"host_ratio": 2.2}, "disk": {"host_ratio": 1.1, "disk_ratio": 2.2}}
    with closing(
        rank_of(decoder, card, pool_tokens=PREFIX_TOKENS + 200, folder=tmp_path, **below[request.param])
    ) as rank:
        yield rank


def ask(rank: OffloadRank, card: ModelCard, name: str, text: str) -> list[str]:
    ids = card.tokenizer.encode(text, add_special_tokens=False).ids
    output = rank.generate({name: ids}, max_tokens=8)[name].output
    return [card.tokenizer.id_to_token(token) for token in output]


def test_128_questions_each_after_a_load(rank: OffloadRank, card: ModelCard) -> None:
    """128 of 128, asked of two prefixes in turn, so that each question brings its whole prefix back first."""
    right = 0
    for number, fact in enumerate(FACTS):
        got = ask(rank, card, fact.key, PREFIXES[number % 2] + fact.question)
        right += got == [fact.value, "<|im_end|>"]
        rank.settle()
    assert right == 128
    stats = rank.scheduler.stats()
    assert stats.cached_tokens >= 126 * PREFIX_TOKENS
    assert stats.computed_tokens < 2.5 * PREFIX_TOKENS + 128 * 20
    assert rank.moved.loaded_pages >= 126 * PREFIX_TOKENS // 16
    assert rank.moved.failed_transfers == 0
    if rank.disk is not None:
        assert rank.moved.fetched_pages > 100 * PREFIX_TOKENS // 16


@pytest.fixture(params=["host", "disk"])
def small_rank(
    request: pytest.FixtureRequest, decoder: Decoder, card: ModelCard, tmp_path: Path
) -> Iterator[OffloadRank]:
    """The device has room for half a prefix; the host for both, or for one while the disk has both."""
    below = {"host": {"host_ratio": 4.2}, "disk": {"host_ratio": 2.1, "disk_ratio": 4.2}}
    with closing(
        rank_of(decoder, card, pool_tokens=PREFIX_TOKENS // 2 + 96, folder=tmp_path, **below[request.param])
    ) as rank:
        yield rank


def test_128_questions_on_prefixes_longer_than_the_device(small_rank: OffloadRank, card: ModelCard) -> None:
    """128 of 128, asked of two prefixes in turn, of each of which no more than a half is ever on the device."""
    rank, right = small_rank, 0
    assert rank.layout.pages[0] * 16 < PREFIX_TOKENS
    for number, fact in enumerate(FACTS):
        got = ask(rank, card, fact.key, PREFIXES[number % 2] + fact.question)
        right += got == [fact.value, "<|im_end|>"]
        rank.settle()
    assert right == 128
    stats = rank.scheduler.stats()
    assert stats.cached_tokens >= 126 * PREFIX_TOKENS
    assert stats.computed_tokens < 2.5 * PREFIX_TOKENS + 128 * 20
    assert rank.read_below_tokens > 126 * PREFIX_TOKENS // 2
    assert rank.moved.failed_transfers == 0
    if rank.disk is not None:
        assert rank.moved.fetched_pages > 50 * PREFIX_TOKENS // 16


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_127500_tokens(decoder: Decoder, card: ModelCard) -> None:
    """128 of 128 at the length of the published failure, asked in turn with 32 of another prefix of 30,000 tokens.

    The device has room for half of the long prefix, the host for both.
    """
    long_tokens, other_tokens = 127_500, 30_000
    rank = rank_of(decoder, card, pool_tokens=65_536, window_pool_tokens=1024, host_ratio=2.6)
    started = time.monotonic()
    long, other = haystack(long_tokens, FACTS, seed=4), haystack(other_tokens, FACTS, seed=5)
    right = 0
    for number, fact in enumerate(FACTS):
        right += ask(rank, card, fact.key, long + fact.question) == [fact.value, "<|im_end|>"]
        rank.settle()
        if number == 0:
            first_seconds = time.monotonic() - started
        if number % 4 == 0:
            assert ask(rank, card, f"other {fact.key}", other + fact.question) == [fact.value, "<|im_end|>"]
            rank.settle()
    rank.close()
    seconds = time.monotonic() - started
    print(f"{right} of 128; {first_seconds:.0f} s for the first question, {seconds:.0f} s in all, {rank.moved}")
    assert right == 128
    assert rank.read_below_tokens > 127 * (long_tokens - 65_536)
    stats = rank.scheduler.stats()
    assert stats.computed_tokens < 1.01 * (long_tokens + other_tokens) + 160 * 60
