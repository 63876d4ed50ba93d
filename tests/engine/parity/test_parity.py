"""Logits and greedy output equal transformers' on the same weights, however the cache came to hold the prefix."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from parity_rank import ParityRank
from tiny_models import FAMILIES, VOCAB, WINDOW, TinyModel, make_tiny_model

from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.tokenizer import read_card
from engine_shim.types import Request

# Logits are of the order of ten; float32 sums in another order differ by a few 1e-5. Delta nets solve triangular
# systems, transformers and we in blocks of other tokens, and carry the difference along: see the float64 test below.
TOLERANCE = 2e-4
DELTA_NET_TOLERANCE = 2e-3


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder: Path = tmp_path_factory.mktemp(request.param)
    return make_tiny_model(request.param, folder)


@pytest.fixture(scope="module")
def decoder(tiny: TinyModel) -> Decoder:
    return load_decoder(read_card(str(tiny.folder)))


def prompt(length: int, *, seed: int) -> list[int]:
    """Random tokens without the special ones."""
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def assert_parity(rank: ParityRank, request: Request, tiny: TinyModel, *, computed_from: int = 0) -> None:
    """Every logit from ``computed_from`` on, and every sampled token, is transformers'."""
    expected = tiny.logits(request.tokens)
    # The last sampled token is never run.
    positions = range(computed_from, len(request.tokens) - 1)
    actual = torch.stack([rank.logits[request.id][position] for position in positions])
    tolerance = DELTA_NET_TOLERANCE if tiny.family == "qwen3_next" else TOLERANCE
    torch.testing.assert_close(actual, expected[computed_from:-1], atol=tolerance, rtol=tolerance)
    # Greedy: each token is the likeliest after all before it, which by induction is transformers' own output.
    assert request.output == expected[len(request.prompt) - 1 : -1].argmax(-1).tolist()


def test_cold(tiny: TinyModel, decoder: Decoder) -> None:
    """A prompt run whole from an empty cache."""
    rank = ParityRank(decoder)
    request = rank.generate({"a": prompt(150, seed=1)})["a"]
    assert len(request.output) == 32
    assert_parity(rank, request, tiny)


@pytest.mark.parametrize("chunk_tokens", [1, 13, 31])
def test_chunked_prefill(tiny: TinyModel, decoder: Decoder, chunk_tokens: int) -> None:
    """A prompt run in chunks that do not divide it, the window or the page."""
    rank = ParityRank(decoder, chunk_tokens=chunk_tokens)
    assert_parity(rank, rank.generate({"a": prompt(131, seed=2)})["a"], tiny)


def test_batch(tiny: TinyModel, decoder: Decoder) -> None:
    """Prefills and decodes of very different lengths in one batch do not touch each other."""
    rank = ParityRank(decoder, chunk_tokens=97)
    lengths = [1, 7, 8, 9, 23, 24, 25, 64, 190]
    prompts = {f"{n} tokens": prompt(n, seed=n) for n in lengths}
    for request in rank.generate(prompts).values():
        assert_parity(rank, request, tiny)
    assert rank.largest_batch == len(lengths)


def test_warm_prefix(tiny: TinyModel, decoder: Decoder) -> None:
    """A prefix another request left in the cache gives the same logits as one computed anew."""
    rank = ParityRank(decoder, chunk_tokens=53)
    first = prompt(120, seed=3)
    done = rank.generate({"first": first})["first"]
    # Whole pages of 8, at most up to the last token but one: 120 -> 112, 151 run -> 144, 77 -> 72.
    turns = {
        "same": (first, 112),
        "next turn": ([*done.tokens, *prompt(40, seed=4)], 144),
        "fork": ([*first[:77], *prompt(50, seed=5)], 72),
    }
    for name, (tokens, cached_tokens) in turns.items():
        request = rank.generate({name: tokens})[name]
        # Window and recurrent layers resume at the end of a prompt and of a turn; a fork comes too early for them.
        if tiny.family not in ("gemma3", "qwen3_next") or name != "fork":
            assert request.cached_tokens == cached_tokens
        assert_parity(rank, request, tiny, computed_from=request.cached_tokens)


def test_the_next_one_at_a_fork(tiny: TinyModel, decoder: Decoder) -> None:
    """Whoever forked left window and state there: the next prompt with that head reuses it, to the page."""
    rank = ParityRank(decoder, chunk_tokens=53)
    head = prompt(77, seed=70)
    for n in range(3):
        name = f"fork {n}"
        request = rank.generate({name: [*head, *prompt(60, seed=71 + n)]}, max_tokens=4)[name]
        assert_parity(rank, request, tiny, computed_from=request.cached_tokens)
    assert request.cached_tokens == 72


def test_warm_batch_shares_one_prefix(tiny: TinyModel, decoder: Decoder) -> None:
    """Requests that run together over one cached prefix read the same pages and write only their own."""
    rank = ParityRank(decoder, chunk_tokens=61)
    shared = prompt(96, seed=6)
    rank.generate({"shared": shared})
    requests = rank.generate({f"fork {n}": [*shared, *prompt(5 + 9 * n, seed=60 + n)] for n in range(5)})
    for request in requests.values():
        assert request.cached_tokens == 96
        assert_parity(rank, request, tiny, computed_from=request.cached_tokens)


def test_after_eviction(tiny: TinyModel, decoder: Decoder) -> None:
    """Prefixes that were evicted and computed again, in whatever pages are free, are exact."""
    rank = ParityRank(decoder, pool_tokens=320, chunk_tokens=45)
    prompts = [prompt(100, seed=10 + n) for n in range(6)]
    for turn in range(2):
        for n, tokens in enumerate(prompts):
            name = f"{n}, turn {turn}"
            request = rank.generate({name: tokens}, max_tokens=8)[name]
            assert_parity(rank, request, tiny, computed_from=request.cached_tokens)
    assert rank.scheduler.stats().evicted_pages[0] > 0
    assert rank.pages_filled[0] > rank.layout.pages[0]


def test_after_preemption(tiny: TinyModel, decoder: Decoder) -> None:
    """A request that lost its pages halfway continues with the tokens it would have had."""
    rank = ParityRank(decoder, pool_tokens=400, chunk_tokens=64)
    requests = rank.generate({f"{n}": prompt(60, seed=30 + n) for n in range(5)}, max_tokens=60)
    assert rank.scheduler.stats().preemptions > 0
    for request in requests.values():
        assert_parity(rank, request, tiny)


def test_warm_equals_cold_in_float64(tiny: TinyModel) -> None:
    """With rounding out of the way, a prefix from the cache and chunks of odd sizes change nothing at all."""
    decoder = load_decoder(read_card(str(tiny.folder)), dtype=torch.float64)
    cold, warm = ParityRank(decoder), ParityRank(decoder, chunk_tokens=37)
    warm.generate({"before": prompt(100, seed=96)}, max_tokens=20)
    tokens = [*prompt(100, seed=96), *prompt(50, seed=97)]
    expected, actual = (rank.generate({"a": tokens})["a"] for rank in (cold, warm))
    assert actual.cached_tokens >= 96
    assert actual.output == expected.output
    rows = range(actual.cached_tokens, len(actual.tokens) - 1)
    logits = [torch.stack([rank.logits["a"][row] for row in rows]) for rank in (warm, cold)]
    torch.testing.assert_close(*logits, atol=1e-9, rtol=1e-9)


def test_states_recycled(tmp_path: Path) -> None:
    """Six slots for states serve three conversations of three turns in turn: each is evicted, and exact again."""
    tiny = make_tiny_model("qwen3_next", tmp_path)
    rank = ParityRank(load_decoder(read_card(str(tiny.folder))), state_slots=6, chunk_tokens=29)
    histories = [prompt(40 + n, seed=80 + n) for n in range(3)]
    for turn in range(3):
        for n, history in enumerate(histories):
            name = f"{n}, turn {turn}"
            request = rank.generate({name: history}, max_tokens=20)[name]
            assert_parity(rank, request, tiny, computed_from=request.cached_tokens)
            again = rank.generate({f"{name} again": history}, max_tokens=2)[f"{name} again"]
            assert again.cached_tokens == (len(history) - 1) // 8 * 8
            assert_parity(rank, again, tiny, computed_from=again.cached_tokens)
            histories[n] = [*request.tokens, *prompt(30, seed=90 + 3 * n + turn)]
    assert rank.scheduler.stats().evicted_pages[1] > 10


def test_a_long_decode_keeps_its_state(tmp_path: Path) -> None:
    """400 tokens decoded one by one from a float32 state read like one pass over all of them."""
    tiny = make_tiny_model("qwen3_next", tmp_path)
    rank = ParityRank(load_decoder(read_card(str(tiny.folder))))
    request = rank.generate({"a": prompt(30, seed=95)}, max_tokens=400)["a"]
    assert_parity(rank, request, tiny)
    assert rank.runner.states is not None
    assert rank.runner.states.memories.dtype == torch.float32


def test_window_pages_recycled(tmp_path: Path) -> None:
    """A window pool far smaller than the context suffices, its pages being used over and over."""
    tiny = make_tiny_model("gemma3", tmp_path)
    decoder = load_decoder(read_card(str(tiny.folder)))
    rank = ParityRank(decoder, window_pool_tokens=20 * 8, chunk_tokens=29)
    prompts = {f"{n}": prompt(300 + n, seed=40 + n) for n in range(2)}
    requests = rank.generate(prompts, max_tokens=100)
    for request in requests.values():
        assert len(request.tokens) > 10 * WINDOW
        assert_parity(rank, request, tiny)
    assert rank.pages_filled[1] > 3 * rank.layout.pages[1]
