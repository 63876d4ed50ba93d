"""Steps ahead beside what else a rank does: a real decoder says the same with and without, and what ran is seen."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from overlapped_rank import OverlappedOffloadRank, OverlappedRank
from test_speculative import HalfRight
from test_structured import GRAMMARS, constraints
from tiny_models import VOCAB, make_tiny_model

from engine_shim.attention.plan import make_plan
from engine_shim.grammar import GrammarKind
from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.tokenizer import read_card
from engine_shim.runner.shadow import ShadowError
from engine_shim.runner.steps import Step
from engine_shim.speculative.ngram import NgramDrafter
from engine_shim.types import Batch, Chunk, Request, Sampling, WindowTails

PROMPTS = [tuple((17 * n + 5 * i * (1 + i % 3)) % (VOCAB - 3) + 3 for i in range(9 + 7 * n)) for n in range(6)]


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
    greedy, drawn = Sampling(12, ignore_eos=True), Sampling(12, temperature=1.0, seed=7, ignore_eos=True)
    asked = [Request(f"q{n}", prompt, drawn if n % 2 else greedy) for n, prompt in enumerate(PROMPTS)]
    return [*asked, *(dataclasses.replace(each, id=f"{each.id} again") for each in asked[3:5])]


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_drafts(decoders: dict[str, Decoder], family: str) -> None:
    """A rank that tries drafts launches nothing ahead, goes on trying them, and says what one without says."""
    decoder = decoders[family]
    expected = OverlappedRank(decoder, overlaps=False).finish(requests())
    drafted = OverlappedRank(decoder, overlaps=True, drafter=HalfRight(expected), draft_tokens=3)
    assert drafted.finish(requests()) == expected
    assert drafted.ahead == 0
    assert drafted.scheduler.stats().drafted_tokens > 10


def test_structured_output(decoders: dict[str, Decoder]) -> None:
    """Who follows a grammar has everybody wait; when he has ended, the others go ahead."""

    def asked() -> list[Request]:
        number = next(n for n, grammar in enumerate(GRAMMARS) if grammar.kind is GrammarKind.REGEX)
        (constraint,) = constraints([GRAMMARS[number]])
        return [Request("grammar", (5, 6, 7), Sampling(30), constraint=constraint), *requests()]

    decoder = decoders["llama"]
    plain, overlapped = (OverlappedRank(decoder, overlaps=overlaps) for overlaps in (False, True))
    assert overlapped.finish(asked()) == plain.finish(asked())
    assert overlapped.ahead > 10


@pytest.mark.parametrize("tails", [WindowTails.REBUILT, WindowTails.RING])
def test_windows_that_are_not_stored(decoders: dict[str, Decoder], tails: WindowTails) -> None:
    """Rebuilt or in rings, beside prompts that are asked again."""
    plain, overlapped = (
        OverlappedRank(decoders["gemma3"], overlaps=overlaps, window_tails=tails) for overlaps in (False, True)
    )
    expected = OverlappedRank(decoders["gemma3"], overlaps=False).finish(requests())
    assert plain.finish(requests()) == overlapped.finish(requests()) == expected
    assert overlapped.ahead > 10


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_offload(decoders: dict[str, Decoder], family: str) -> None:
    """Prefixes come back from the host while steps are launched ahead; a small pool has given them up meanwhile."""
    loaded = []
    results = []
    for overlaps in (False, True):
        rank = OverlappedOffloadRank(
            decoders[family], overlaps=overlaps, host_ratio=6, pool_tokens=96, chunk_tokens=32, max_running=2
        )
        try:
            found = rank.finish(requests()[:6])
            rank.settle()
            found |= rank.finish(requests()[6:])
            rank.settle()
        finally:
            rank.close()
        results.append(found)
        loaded.append(rank.moved.loaded_pages)
    assert results[0] == results[1]
    assert rank.ahead > 10
    assert min(loaded) > 0


def test_a_prefill_in_progress_chooses_no_token(decoders: dict[str, Decoder]) -> None:
    """Behind chunks that sample nothing each sequence still goes on with its own token."""

    def run(*, ahead: bool) -> list[tuple[int, ...]]:
        rank = OverlappedRank(decoders["llama"], overlaps=True)
        long, first, second = (Request(str(n), PROMPTS[n], Sampling(9)) for n in (5, 0, 1))
        batch = Batch(
            (
                Chunk(long, start=0, count=8, tables=([1],), samples=False, draws=0),
                Chunk(first, start=0, count=9, tables=([2, 3],), samples=True, draws=0),
                Chunk(second, start=0, count=16, tables=([4, 5, 6],), samples=True, draws=0),
            )
        )
        behind = Batch(
            tuple(
                Chunk(request, start=len(request.prompt), count=1, tables=(pages,), samples=True, draws=1,
                      awaits_token=ahead)
                for request, pages in ((second, [4, 5, 6]), (first, [2, 3]))
            )
        )  # fmt: skip
        landing = rank.runner.launch(batch)
        if ahead:
            launched = rank.runner.launch(behind)
            return [each.tokens for each in (*landing(), *launched())]
        chosen = landing()
        for request, sampled in zip((first, second), chosen, strict=True):
            request.tokens += sampled.tokens
        return [each.tokens for each in (*chosen, *rank.runner.run(behind))]

    assert run(ahead=True) == run(ahead=False)


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
        rank.finish(requests())
