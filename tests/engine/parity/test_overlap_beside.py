"""Steps ahead beside what else a rank does: a real decoder says the same with and without, and what ran is seen."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from test_overlap import OverlappedRank
from test_speculative import HalfRight
from tiny_models import VOCAB, make_tiny_model

from engine_shim.attention.plan import make_plan
from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.tokenizer import read_card
from engine_shim.runner.shadow import ShadowError
from engine_shim.runner.steps import Step
from engine_shim.speculative.ngram import NgramDrafter
from engine_shim.types import Batch, Chunk, Request, Sampling

PROMPTS = [tuple((17 * n + 5 * i * (1 + i % 3)) % (VOCAB - 3) + 3 for i in range(9 + 11 * n)) for n in range(6)]


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    """Full attention alone, with sliding windows, with recurrent layers; float64."""
    return {
        family: load_decoder(
            read_card(str(make_tiny_model(family, tmp_path_factory.mktemp(family)).folder)), dtype=torch.float64
        )
        for family in ("llama", "gemma3", "qwen3_next")
    }


def requests() -> list[Request]:
    """Greedy and drawn; two are asked again at the end."""
    greedy, drawn = Sampling(20, ignore_eos=True), Sampling(20, temperature=1.0, seed=7, ignore_eos=True)
    asked = [Request(f"q{n}", prompt, drawn if n % 2 else greedy) for n, prompt in enumerate(PROMPTS)]
    return [*asked, *(dataclasses.replace(each, id=f"{each.id} again") for each in asked[3:5])]


def answers(rank: OverlappedRank, asked: list[Request]) -> dict[str, list[int]]:
    for request in asked:
        rank.scheduler.add(request)
    while rank.scheduler.has_work:
        rank.step()
    return {request.id: request.output for request in asked}


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_drafts(decoders: dict[str, Decoder], family: str) -> None:
    """A rank that tries drafts launches nothing ahead, goes on trying them, and says what one without says."""
    decoder = decoders[family]
    expected = answers(OverlappedRank(decoder, overlaps=False), requests())
    drafted = OverlappedRank(decoder, overlaps=True, drafter=HalfRight(expected), draft_tokens=3)
    assert answers(drafted, requests()) == expected
    assert drafted.ahead == 0
    assert drafted.scheduler.stats().drafted_tokens > 20


def awaiting(request: Request) -> Batch:
    chunk = Chunk(request, start=3, count=1, tables=([1],), samples=True, draws=1, awaits_token=True)
    return Batch((chunk,))


def test_nobody_runs_an_awaited_token_that_is_not_there(decoders: dict[str, Decoder]) -> None:
    """A plan that nobody completes is refused; so is a step with drafts, and one that has run without the token."""
    decoder = decoders["llama"]
    batch = awaiting(Request("a", (1, 2, 3), Sampling(9)))
    rank = OverlappedRank(decoder, overlaps=True, drafter=NgramDrafter(), draft_tokens=3)
    with pytest.raises(ValueError, match="awaits a token"):
        make_plan(batch, rank.layout, device=decoder.device, dtype=decoder.dtype)
    with pytest.raises(ValueError, match="awaits a token"):
        rank.runner.launch(batch)()
    first = Batch((dataclasses.replace(batch.chunks[0], start=0, count=3, awaits_token=False),))
    behind = Step(batch, None, behind=Step(first, None, behind=None, device=decoder.device), device=decoder.device)
    with pytest.raises(RuntimeError, match="without the tokens"):
        behind.sampled()


def test_the_shadow_sees_which_token_was_run(decoders: dict[str, Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever gives a step another sequence's token is found out when it lands."""
    rows = Step._rows

    def turned(self: Step, before: Step) -> list[tuple[int, int]]:
        found = rows(self, before)
        return [(target, source) for (target, _), (_, source) in zip(found, found[::-1], strict=True)]

    monkeypatch.setattr(Step, "_rows", turned)
    rank = OverlappedRank(decoders["llama"], overlaps=True)
    with pytest.raises(ShadowError, match="which it awaited"):
        answers(rank, requests())
