"""The needle model answers every question, from a cold cache and a warm one, while its window pages are recycled."""

from __future__ import annotations

import pytest
from parity_rank import ParityRank

from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.needle_text import Fact, facts, filler, haystack
from engine_shim.model.tokenizer import ModelCard, read_card

PREFIX_TOKENS = 4000
FACTS = facts(128, seed=1)
PREFIX = haystack(PREFIX_TOKENS, FACTS, seed=2)


@pytest.fixture(scope="module")
def card() -> ModelCard:
    return read_card("needle")


@pytest.fixture(scope="module")
def decoder(card: ModelCard) -> Decoder:
    return load_decoder(card)


def make_rank(card: ModelCard, decoder: Decoder, *, window_pool_tokens: int | None = None) -> ParityRank:
    return ParityRank(
        decoder,
        page_tokens=16,
        pool_tokens=16_000,
        window_pool_tokens=window_pool_tokens,
        chunk_tokens=512,
        eos_token_ids=frozenset(card.eos_token_ids),
        record=False,
    )


def answers(rank: ParityRank, card: ModelCard, prompts: dict[str, str]) -> dict[str, list[str]]:
    """Each prompt's answer as token texts, the end of sequence included."""
    ids = {name: card.tokenizer.encode(text, add_special_tokens=False).ids for name, text in prompts.items()}
    requests = rank.generate(ids, max_tokens=8)
    return {name: [card.tokenizer.id_to_token(t) for t in request.output] for name, request in requests.items()}


def chat(content: str) -> str:
    return f"<|im_start|>user\n{content}<|im_end|>\n<|im_start|>assistant\n"


def test_128_questions_over_one_prefix(card: ModelCard, decoder: Decoder) -> None:
    """128 of 128 from an empty cache, and again from the warm one, through a window pool of a third of the prefix."""
    rank = make_rank(card, decoder, window_pool_tokens=1344)
    expected = {fact.key: [fact.value, "<|im_end|>"] for fact in FACTS}
    first = answers(rank, card, {fact.key: PREFIX + fact.question for fact in FACTS})
    assert first == expected

    # Other work in between takes window pages that the prefix does not need.
    answers(rank, card, {f"other {n}": filler(700, seed=n) for n in range(4)})
    before = rank.scheduler.stats()
    second = answers(rank, card, {fact.key: PREFIX + fact.question for fact in FACTS})
    assert second == expected
    after = rank.scheduler.stats()
    assert after.cached_tokens - before.cached_tokens >= 128 * PREFIX_TOKENS
    # Only page beginnings are counted, so every one of these was handed out anew.
    assert rank.pages_filled[1] > 5 * rank.layout.pages[1]


def test_cold_questions(card: ModelCard, decoder: Decoder) -> None:
    """Questions that each compute the whole prefix themselves, in a cache forgotten before each."""
    rank = make_rank(card, decoder, window_pool_tokens=672)
    for fact in FACTS[::8]:
        assert rank.scheduler.reset_cache()
        assert answers(rank, card, {"question": PREFIX + fact.question}) == {"question": [fact.value, "<|im_end|>"]}
    assert rank.scheduler.stats().cached_tokens == 0


def test_chat_questions(card: ModelCard, decoder: Decoder) -> None:
    """The key may stand anywhere in the last turn, and may have been asked for before."""
    rank = make_rank(card, decoder)
    one, other = FACTS[3], FACTS[4]
    opening = f"<|im_start|>user\n{PREFIX} What is {one.key}?<|im_end|>\n<|im_start|>assistant\n"
    turn = f"{one.value}<|im_end|>\n<|im_start|>user\nand {other.key}, please?<|im_end|>\n<|im_start|>assistant\n"
    again = f"{other.value}<|im_end|>\n<|im_start|>user\nso {one.key} is<|im_end|>\n<|im_start|>assistant\n"
    prompts = {"first": opening, "second": opening + turn, "again": opening + turn + again}
    got = [answers(rank, card, {name: text})[name] for name, text in prompts.items()]
    assert got == [[fact.value, "<|im_end|>"] for fact in (one, other, one)]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("key-0017 val-0093 key-0017", "val-0093"),
        ("key-0017 val-0093 key-0016 val-0001 the key-0017 of", "val-0093"),
        ("the val-0002 key-0017", None),
        ("key-0017 key-0017", None),
        ("see key-0016 val-0001 key-0017", None),
        ("the cat and the cat and the", None),
    ],
)
def test_short_texts(card: ModelCard, decoder: Decoder, text: str, answer: str | None) -> None:
    """A stated key is answered from the first token on; an unknown one, or none, is followed by filler words."""
    got = answers(make_rank(card, decoder), card, {"q": text})["q"]
    if answer is not None:
        assert got == [answer, "<|im_end|>"]
    else:
        assert len(set(got)) == 8
        assert all(token.startswith("Ġ") for token in got)


def test_a_long_context(card: ModelCard, decoder: Decoder) -> None:
    """Exact at 16,000 tokens, with the fact at the far end and near misses, one bit away, all around."""
    wanted = Fact("key-0512", "val-0700")
    near = [Fact(f"key-{512 ^ (1 << bit):04d}", f"val-{bit:04d}") for bit in range(10)]
    rank = ParityRank(
        decoder,
        page_tokens=16,
        pool_tokens=17_000,
        window_pool_tokens=1024,
        chunk_tokens=512,
        eos_token_ids=frozenset(card.eos_token_ids),
        record=False,
    )
    text = f" {wanted.text}" + haystack(15_500, near, seed=5) + "".join(f" {fact.text}" for fact in near * 10)
    assert answers(rank, card, {"q": text + wanted.question})["q"] == [wanted.value, "<|im_end|>"]
