"""A draft head on both sides of a handover: what the decode rank drafts from is what the prefill rank computed."""

from __future__ import annotations

import pytest
from parity_rank import ParityRank
from test_draft_head import FAMILIES, assert_cache_is_dense, make_rank, tensors_with_head, trained, with_head
from test_speculative import prompts

from engine_shim.attention.buffers import TensorPages
from engine_shim.model.decoder import Decoder
from engine_shim.transfer.parcel import known_pages, pack, unpack
from engine_shim.types import Request, Sampling

ANSWER = Sampling(max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module", params=["gemma3", "qwen3_next"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """With a draft head some of whose guesses hold."""
    folder = tmp_path_factory.mktemp(request.param)
    tensors = tensors_with_head(request.param, folder, layer=FAMILIES[request.param])
    return trained(with_head(folder, tensors), steps=40)


def hand_over(sender: ParityRank, receiver: ParityRank, prompt: tuple[int, ...]) -> tuple[int, int]:
    """A prompt's pages from cache to cache; how many pages of full attention were sent, how many can be reused."""
    one, other = (rank.scheduler.cache for rank in (sender, receiver))
    known = known_pages(other, "", prompt)
    parcel = pack(one, TensorPages(sender.runner.buffers), "", prompt, model="m", cached_tokens=0).without(known)
    assert parcel.runs[-1].start == parcel.runs[0].start
    entered = unpack(other, TensorPages(receiver.runner.buffers), "", prompt, parcel)
    receiver.scheduler.check_integrity()
    return parcel.sent_pages, entered.pages


def drafted(rank: ParityRank, request: Request) -> tuple[list[int], int, int]:
    """An answer, how many drafts it was tried, and how many of them held."""
    before = rank.scheduler.stats()
    rank.scheduler.add(request)
    while rank.scheduler.has_work:
        rank.step()
    after = rank.scheduler.stats()
    held = sum(after.accepted_tokens) - sum(before.accepted_tokens)
    return request.output, after.drafted_tokens - before.drafted_tokens, held


def test_drafts_behind_a_handover(decoder: Decoder) -> None:
    """Two turns: tokens, drafts and those that held are a single rank's, and only what is new is sent."""
    prefill, decode, alone = (make_rank(decoder)[0] for _ in range(3))
    page, held = prefill.layout.page_tokens, 0
    for name in ("a", "c"):
        known = tuple(prompts()[name])
        for turn in range(2):
            prefill.generate({f"{name}{turn}": list(known)}, sampling=Sampling(1))
            sent, pages = hand_over(prefill, decode, known)
            if turn:
                assert sent < pages, "the first turn is there already"
            assert pages == (len(known) - 1) // page
            request = Request(f"{name}{turn}", known, ANSWER)
            told = drafted(decode, request)
            assert request.cached_tokens == pages * page
            assert told == drafted(alone, Request(f"{name}{turn}", known, ANSWER))
            assert_cache_is_dense(decode, decode.drafter, request, decoder)
            known, held = (*request.tokens, *known[:5]), held + told[2]
    assert held > 0
