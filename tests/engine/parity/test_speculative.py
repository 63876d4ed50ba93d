"""Drafts change no answer of full, window and recurrent models, greedy or at random; what breaks that is seen."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from parity_rank import ParityRank
from tiny_models import make_tiny_model

from engine_shim.attention.plan import Plan
from engine_shim.attention.recurrent import PagedRecurrence
from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.tokenizer import read_card
from engine_shim.sampling import Sampler, held
from engine_shim.schedule.limits import Limits
from engine_shim.speculative.drafter import Drafter
from engine_shim.speculative.ngram import LONGEST, SHORTEST, NgramDrafter, lookup
from engine_shim.types import Chunk, Request, Sampled, Sampling

FAMILIES = ["qwen3", "gemma3", "qwen3_next"]  # full; window; recurrent
GREEDY = Sampling(max_tokens=40, ignore_eos=True)
RANDOM = Sampling(max_tokens=40, ignore_eos=True, temperature=0.7, top_p=0.9, seed=3)


class HalfRight:
    """Proposes what another run answered, often with a fault somewhere: drafts hold in part."""

    def __init__(self, answers: dict[str, list[int]], *, seed: int = 0) -> None:
        self._answers = answers
        self._rng = random.Random(seed)

    buffers = ()

    def observe(self, plan: Plan, hidden: torch.Tensor, ends: Sequence[int]) -> None:
        assert all(chunk.start < end <= chunk.start + chunk.count for chunk, end in zip(plan.chunks, ends, strict=True))

    def propose(self, chunks: Sequence[Chunk]) -> list[tuple[int, ...]]:
        return [self._propose(chunk) for chunk in chunks]

    def _propose(self, chunk: Chunk) -> tuple[int, ...]:
        coming = self._answers[chunk.request.id][chunk.draws :][: chunk.room]
        return tuple(token if self._rng.random() < 0.7 else (token + 1) % 300 for token in coming)


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Decoder]:
    folders = {family: tmp_path_factory.mktemp(family) for family in FAMILIES}
    return {
        family: load_decoder(read_card(str(make_tiny_model(family, folder).folder)), dtype=torch.float64)
        for family, folder in folders.items()
    }


def prompts(seed: int = 0) -> dict[str, list[int]]:
    """Texts that repeat themselves, with a common head; two of them fork in the middle of a page."""
    rng = random.Random(seed)
    motif = [rng.randrange(3, 300) for _ in range(7)]
    head = motif * 4
    return {
        "a": head,
        "b": [*head, *motif[:3]],
        "c": [*head[:19], *(rng.randrange(3, 300) for _ in range(30))],
        "d": [rng.randrange(3, 300) for _ in range(11)],
    }


def answers(
    decoder: Decoder, sampling: Sampling, *, drafter: Drafter | None = None, pool_tokens: int = 1024, rounds: int = 2
) -> tuple[list[dict[str, list[int]]], ParityRank]:
    """What the prompts, then each with its answer behind it, are answered; and the rank that did it."""
    rank = ParityRank(
        decoder,
        pool_tokens=pool_tokens,
        window_pool_tokens=min(pool_tokens, 240),
        state_slots=14,
        record=False,
        drafter=drafter,
        draft_tokens=5 if drafter else 0,
    )
    asked, told = prompts(), []
    for _ in range(rounds):
        requests = rank.generate(asked, sampling=sampling)
        told.append({name: request.output for name, request in requests.items()})
        asked = {name: request.tokens for name, request in requests.items()}
    return told, rank


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_the_same(decoders: dict[str, Decoder], family: str, sampling: Sampling) -> None:
    """In two rounds of a conversation, with preemptions, and with drafts that hold in part, wholly or not at all."""
    plain, _ = answers(decoders[family], sampling)
    assert plain == answers(decoders[family], sampling, drafter=NgramDrafter())[0]
    known = HalfRight(plain[0])
    first, rank = answers(decoders[family], sampling, drafter=known, pool_tokens=200, rounds=1)
    assert first == plain[:1]
    stats = rank.scheduler.stats()
    assert 0.2 < sum(stats.accepted_tokens) / stats.drafted_tokens < 0.9
    # What it left in the cache is what a second round without drafts answers from.
    rank.scheduler._draft_tokens = 0
    asked = {name: [*prompt, *plain[0][name]] for name, prompt in prompts().items()}
    again = rank.generate(asked, sampling=sampling)
    assert {name: request.output for name, request in again.items()} == plain[1]
    assert rank.scheduler.stats().cached_tokens > stats.cached_tokens


def test_a_text_that_repeats_itself_takes_fewer_steps(decoders: dict[str, Decoder]) -> None:
    """Where an answer runs in circles, as greedy ones of small models do, most steps bring several tokens."""
    _, rank = answers(decoders["qwen3"], Sampling(max_tokens=80, ignore_eos=True), drafter=NgramDrafter(), rounds=1)
    stats = rank.scheduler.stats()
    per_forward = 1 + sum(stats.accepted_tokens) / stats.drafts
    assert per_forward > 2.0


# --- the rule ---------------------------------------------------------------------------------------------


@given(chosen=st.lists(st.integers(0, 2), min_size=1, max_size=6), drafts=st.lists(st.integers(0, 2), max_size=5))
def test_drafts_hold_up_to_the_first_that_does_not(chosen: list[int], drafts: list[int]) -> None:
    """And the token chosen in its place, or behind all of them, comes after."""
    drafts = drafts[: len(chosen) - 1]
    taken = held(chosen, drafts)
    agreed = len(taken) - 1
    assert list(taken) == chosen[: agreed + 1]
    assert list(taken[:-1]) == drafts[:agreed]
    assert agreed == len(drafts) or drafts[agreed] != chosen[agreed]


def test_a_draft_holds_as_often_as_it_is_likely() -> None:
    """Over 4,000 seeds tokens come as often as without drafts, and a draft of probability p holds p of the time.

    Expected counts are the softmax's; three standard deviations around them are allowed.
    """
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0], [0.0, 1.5, 0.0, 0.5]], dtype=torch.float64)
    likely = logits.softmax(dim=-1).tolist()
    runs, draft = 4000, 2
    first: Counter[int] = Counter()
    second: Counter[int] = Counter()
    for seed in range(runs):
        request = Request(str(seed), (0,), Sampling(9, temperature=1.0, seed=seed))
        chunk = Chunk(request, 0, 1, ((),), samples=True, draws=0, room=1)
        (result,) = Sampler()(logits.clone(), [chunk], [(draft,)]).sampled()
        first[result.tokens[0]] += 1
        if len(result.tokens) == 2:
            second[result.tokens[1]] += 1
    taken = sum(second.values())
    assert taken == first[draft]
    for counts, expected, total in ((first, likely[0], runs), (second, likely[1], taken)):
        for token, p in enumerate(expected):
            assert abs(counts[token] - total * p) < 3 * (total * p * (1 - p)) ** 0.5


# --- n-grams ----------------------------------------------------------------------------------------------


@given(tokens=st.lists(st.integers(0, 2), min_size=1, max_size=30), count=st.integers(1, 8))
def test_lookup_by_brute_force(tokens: list[int], count: int) -> None:
    """The latest of the longest matches of the text's end, and what followed it, round and round if it must be."""
    best: tuple[int, int] | None = None
    for end in range(len(tokens) - 1):
        length = 0
        while length < min(LONGEST, end + 1) and tokens[end - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length >= SHORTEST and (best is None or (length, end) > best):
            best = (length, end)
    expected: list[int] = []
    if best is not None:
        copied = list(tokens)
        for place in range(count):
            copied.append(copied[best[1] + 1 + place])
        expected = copied[len(tokens) :]
    assert lookup(array("q", tokens), count) == tuple(expected)


# --- planted bugs -----------------------------------------------------------------------------------------


def uncommitted_drafts_published(patch: pytest.MonkeyPatch) -> None:
    """Every draft that was tried counts as computed, so what did not hold is stored and told."""
    take = Limits.take

    def bad(self: Limits, request: Request, sampled: Sampled) -> tuple[int, ...]:
        return take(self, request, sampled) + (0,) * (sampled.drafted - len(sampled.tokens) + 1)

    patch.setattr(Limits, "take", bad)


def state_not_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """The recurrent state is left as after the last draft, whether that held or not."""
    settle = PagedRecurrence.settle

    def bad(self: PagedRecurrence, counts: Sequence[int]) -> None:
        settle(self, [rows.stop - rows.start for _, rows in self._plan.drafted])

    patch.setattr(PagedRecurrence, "settle", bad)


def state_not_settled(patch: pytest.MonkeyPatch) -> None:
    """The recurrent state is left as before the chunk."""
    patch.setattr(PagedRecurrence, "settle", lambda self, counts: None)


@pytest.mark.parametrize("plant", [uncommitted_drafts_published, state_not_rolled_back, state_not_settled])
def test_a_planted_bug_changes_an_answer(decoders: dict[str, Decoder], plant: object, monkeypatch: object) -> None:
    """Or is an error on the way: the tests above have power."""
    plain, _ = answers(decoders["qwen3_next"], GREEDY, rounds=1)
    plant(monkeypatch)
    try:
        drafted, _ = answers(decoders["qwen3_next"], GREEDY, drafter=HalfRight(plain[0]), rounds=1)
    except (AssertionError, RuntimeError, ValueError, IndexError):
        return
    assert drafted != plain
