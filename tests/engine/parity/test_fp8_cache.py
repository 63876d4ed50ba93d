"""A rank whose keys and values have eight bits: what it caches is what it computed, wherever it has been meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exact_arithmetic import exact_arithmetic  # noqa: F401 - a fixture
from offload_rank import OffloadRank
from parity_rank import ParityRank
from tiny_models import VOCAB, make_tiny_model
from torch import Tensor

from engine_shim.attention import fp8
from engine_shim.attention.buffers import TensorPages
from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.needle_text import facts, haystack
from engine_shim.model.tokenizer import read_card
from engine_shim.offload.identity import fingerprint
from engine_shim.transfer.parcel import known_pages, pack, unpack

PROMPTS = {str(n): [(17 * n + 5 * i * (1 + i % 3)) % (VOCAB - 3) + 3 for i in range(33 + 5 * n)] for n in range(4)}


@pytest.fixture(scope="module", params=["gemma3", "qwen3_next"])  # windows; recurrent states, which stay as they are
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    tiny = make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    return load_decoder(read_card(str(tiny.folder)), dtype=torch.float64)


def assert_cold(decoder: Decoder, rank: ParityRank, name: str, tokens: list[int]) -> int:
    """Every logit that a rank computed is, to the last bit, that of one which runs the whole sequence at once."""
    cold = ParityRank(decoder, fp8=True)
    rows = rank.logits[name]
    cold.generate({"cold": tokens[: max(rows) + 1]}, max_tokens=1)
    for position, logits in rows.items():
        assert torch.equal(logits, cold.logits["cold"][position]), f"position {position}"
    return len(rows)


@pytest.mark.usefixtures("exact_arithmetic")
@pytest.mark.timeout(600)
def test_cached_equals_cold(decoder: Decoder, tmp_path: Path) -> None:
    """In chunks, side by side, through evictions, the host and the disk."""
    rank = OffloadRank(
        decoder,
        pool_tokens=112,
        window_pool_tokens=96,
        state_slots=9,
        chunk_tokens=24,
        max_running=2,
        host_ratio=1.2,
        disk_ratio=8.0,
        folder=tmp_path,
        fp8=True,
    )
    try:
        for turn in range(2):
            asked = {f"{name} {turn}": prompt for name, prompt in PROMPTS.items()}
            done = rank.generate(asked, max_tokens=5)
            rank.settle()
            for name, request in done.items():
                assert assert_cold(decoder, rank, name, request.tokens) > 5
    finally:
        rank.close()
    assert rank.moved.loaded_pages > 4
    assert rank.moved.fetched_pages > 0
    assert rank.moved.failed_transfers == 0


@pytest.mark.usefixtures("exact_arithmetic")
@pytest.mark.timeout(600)
def test_a_handover(decoder: Decoder) -> None:
    """The receiver's pages are the sender's, byte for byte, and it goes on from them as if it had computed them."""
    prefill, decode = (ParityRank(decoder, fp8=True) for _ in range(2))
    prompt = PROMPTS["3"]
    prefill.generate({"a": prompt}, max_tokens=1)
    one, other = (rank.scheduler.cache for rank in (prefill, decode))
    ours, theirs = (TensorPages(rank.runner.buffers) for rank in (prefill, decode))
    parcel = pack(one, ours, "", prompt, model="m", cached_tokens=0).without(known_pages(other, "", prompt))
    entered = unpack(other, theirs, "", prompt, parcel)
    assert entered.pages == (len(prompt) - 1) // prefill.layout.page_tokens
    assert pack(other, theirs, "", prompt, model="m", cached_tokens=0) == parcel
    request = decode.generate({"b": prompt}, max_tokens=5)["b"]
    assert request.cached_tokens == entered.pages * prefill.layout.page_tokens
    assert_cold(decoder, decode, "b", request.tokens)


def test_other_bytes_have_another_name(decoder: Decoder) -> None:
    """A rank with eight bits takes no page of one without, over a socket or from a disk."""
    ranks = [ParityRank(decoder, fp8=fp8) for fp8 in (False, True, True)]
    contents = [TensorPages(rank.runner.buffers).contents for rank in ranks]
    prints = [fingerprint(decoder, ranks[0].layout, contents=each) for each in contents]
    assert contents[0] != contents[1] == contents[2]
    assert prints[0] != prints[1] == prints[2]


def test_how_far_off(decoder: Decoder) -> None:
    """Near what the model says with all bits: an error of a 16th in each value comes to no more than that in logits."""
    exact, rounded = (ParityRank(decoder, fp8=fp8) for fp8 in (False, True))
    for rank in (exact, rounded):
        rank.generate(PROMPTS, max_tokens=1)
    for name in PROMPTS:
        whole, eight = (torch.stack([*rank.logits[name].values()]) for rank in (exact, rounded))
        assert 0 < (whole - eight).norm() < whole.norm() / 16


def test_needles() -> None:
    """16 of 16 over a text of 1,500 tokens that is loaded from the host between them."""
    card, asked = read_card("needle"), facts(16, seed=1)
    texts = [haystack(1500, asked, seed=seed) for seed in (2, 3)]
    rank = OffloadRank(
        load_decoder(card),
        page_tokens=16,
        pool_tokens=1700,
        window_pool_tokens=640,
        chunk_tokens=512,
        eos_token_ids=frozenset(card.eos_token_ids),
        record=False,
        host_ratio=2.2,
        fp8=True,
    )
    right = 0
    try:
        for number, fact in enumerate(asked):
            ids = card.tokenizer.encode(texts[number % 2] + fact.question, add_special_tokens=False).ids
            output = rank.generate({fact.key: ids}, max_tokens=8)[fact.key].output
            right += [card.tokenizer.id_to_token(token) for token in output] == [fact.value, "<|im_end|>"]
            rank.settle()
    finally:
        rank.close()
    assert right == 16
    assert rank.moved.loaded_pages >= 14 * 1500 // 16


def scale_of_the_batch(x: Tensor) -> Tensor:
    """One scale for all that are computed together, as scales that are calibrated on the way have it."""
    x = x.float()
    scale = (x.abs().amax() / fp8.GREATEST).expand(*x.shape[:-1], 1).contiguous()
    return torch.cat(((x / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale.view(torch.uint8)), dim=-1)


@pytest.mark.usefixtures("exact_arithmetic")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("plant", [scale_of_the_batch])
def test_a_planted_bug_is_found(
    decoder: Decoder, plant: Callable[[Tensor], Tensor], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is cached must not hang on who was computed beside it."""
    monkeypatch.setattr(fp8, "pack", plant)
    with pytest.raises(AssertionError):
        test_cached_equals_cold(decoder, tmp_path)
