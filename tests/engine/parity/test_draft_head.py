"""The draft head: its guesses and its cache are those of a dense pass, whatever was tried, cached or taken back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from parity_rank import ParityRank
from test_speculative import GREEDY, RANDOM, prompts
from tiny_models import make_tiny_model
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from engine_shim.attention.plan import Plan
from engine_shim.model.decoder import Decoder
from engine_shim.model.norm import normed
from engine_shim.model.tokenizer import read_card
from engine_shim.model.weights import assemble, read_safetensors
from engine_shim.speculative.head import HeadDrafter
from engine_shim.types import Chunk, GroupKind, Request, Sampling

#: Norms are float32 in every model, so sums in another order may differ by its last bit.
TOLERANCE = 1e-5
#: The full-attention layer of each model: a draft layer has its shape.
FAMILIES = {"qwen3": 0, "gemma3": 1, "qwen3_next": 2}


def tensors_with_head(family: str, folder: Path, *, layer: int) -> dict[str, Tensor]:
    """A tiny model's and a draft head's of random weights, under the names of Qwen3-Next's checkpoints."""
    tiny = make_tiny_model(family, folder)
    card = read_card(str(tiny.folder))
    tensors = read_safetensors(tiny.folder)
    generator = torch.Generator().manual_seed(5)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    prefix = f"model.layers.{layer}."
    for name, tensor in list(tensors.items()):
        if name.startswith(prefix):
            tensors[f"mtp.layers.0.{name.removeprefix(prefix)}"] = noise(*tensor.shape)
    width = card.config.hidden_size
    for name in ("mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"):
        tensors[f"{name}.weight"] = 1 + noise(width) if family == "qwen3" else noise(width)
    tensors["mtp.fc.weight"] = noise(width, 2 * width)
    return tensors


def with_head(folder: Path, tensors: Mapping[str, Tensor]) -> Decoder:
    """The model of a directory, in float64."""
    card = read_card(str(folder))
    weights = assemble(card.config, tensors, device=torch.device("cpu"), dtype=torch.float64)
    return Decoder(card.config, weights)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    folder = tmp_path_factory.mktemp(request.param)
    return trained(with_head(folder, tensors_with_head(request.param, folder, layer=FAMILIES[request.param])))


# --- the head without cache, pages and steps ----------------------------------------------------------------


class Dense:
    """Causal attention over the rows alone; keeps the keys and values it was given."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        self.key, self.value = key, value
        q, k, v = (each.transpose(0, 1)[None] for each in (query, key, value))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=True)
        return out[0].transpose(0, 1)


def dense(decoder: Decoder, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Dense]:
    """Logits of the head at every position, and its keys and values. ``hidden[p]`` is the model's at p."""
    weights = decoder.weights.draft
    assert weights is not None
    full = next(layer for layer in decoder.config.layers if layer.window_tokens is None and not layer.recurrent)
    head = Decoder(
        replace(decoder.config, layers=(full,)),
        replace(decoder.weights, layers=(weights.layer,), final_norm=weights.final_norm),
    )
    before = torch.cat((torch.zeros_like(hidden[:1]), hidden[:-1]))
    mixed = torch.cat((normed(head.embed(tokens), weights.embedding_norm), normed(before, weights.hidden_norm)), 1)
    attention = Dense(decoder.config.attention_scale)
    x = head.run(F.linear(mixed, weights.mix), torch.arange(len(tokens)), attention=attention)
    return head.logits(x), attention


class Watched(HeadDrafter):
    """Keeps the model's hidden states by request and position, and what it proposed."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.hidden: dict[str, dict[int, Tensor]] = {}
        self.proposed: dict[tuple[str, int], tuple[int, ...]] = {}

    def propose(self, chunks: Sequence[Chunk]) -> list[tuple[int, ...]]:
        drafts = super().propose(chunks)
        for chunk, tried in zip(chunks, drafts, strict=True):
            self.proposed[chunk.request.id, chunk.start] = tried
        return drafts

    def observe(self, plan: Plan, hidden: Tensor, ends: Sequence[int]) -> None:
        super().observe(plan, hidden, ends)
        rows = iter(self._decoder.normed(hidden))
        for chunk, end in zip(plan.chunks, ends, strict=True):
            for position in range(chunk.start, chunk.start + chunk.count):
                row = next(rows)
                if position < end:
                    self.hidden.setdefault(chunk.request.id, {})[position] = row


def trained(decoder: Decoder, *, steps: int = 60) -> Decoder:
    """The same model, its head taught by the model's own greedy answers, so that some of its guesses hold."""
    rank = ParityRank(decoder, record=False)
    texts = []
    for request in rank.generate(prompts(), sampling=GREEDY).values():
        tokens = torch.tensor(request.tokens)
        texts.append((tokens, hidden_states(decoder, request.tokens)))
    draft = decoder.weights.draft
    assert draft is not None
    mix = draft.mix.clone().requires_grad_()
    learner = torch.optim.Adam([mix], lr=0.04)
    for _ in range(steps):
        loss = torch.zeros((), dtype=torch.float64)
        for tokens, hidden in texts:
            learning = Decoder(decoder.config, replace(decoder.weights, draft=replace(draft, mix=mix)))
            logits, _ = dense(learning, tokens, hidden)
            loss = loss + F.cross_entropy(logits[:-1], tokens[1:])
        learner.zero_grad()
        loss.backward()
        learner.step()
    return Decoder(decoder.config, replace(decoder.weights, draft=replace(draft, mix=mix.detach())))


def hidden_states(decoder: Decoder, tokens: list[int]) -> Tensor:
    """The model's normed hidden state at every position, from one cold pass."""
    states: dict[int, Tensor] = {}

    class Listener:
        buffers = ()

        def propose(self, chunks: Sequence[Chunk]) -> list[tuple[int, ...]]:
            return [() for _ in chunks]

        def observe(self, plan: Plan, hidden: Tensor, ends: Sequence[int]) -> None:
            states.update(enumerate(decoder.normed(hidden).clone(), start=plan.chunks[0].start))

    rank = ParityRank(decoder, record=False, drafter=Listener())
    rank.generate({"x": tokens}, sampling=Sampling(1))
    return torch.stack([states[position] for position in range(len(tokens))])


def make_rank(decoder: Decoder, *, drafts: int = 4, pool_tokens: int = 1024) -> tuple[ParityRank, Watched]:
    rank = ParityRank(
        decoder,
        pool_tokens=pool_tokens,
        state_slots=14,
        record=False,
        draft_tokens=drafts,
        drafter=lambda layout: Watched(decoder, layout),
    )
    drafter = rank.drafter
    assert isinstance(drafter, Watched)
    return rank, drafter


def assert_cache_is_dense(rank: ParityRank, drafter: Watched, request: Request, decoder: Decoder) -> int:
    """Each draft page of the tree holds what a dense pass over the request's tokens gives; returns how many pages."""
    cache, page = rank.scheduler._memory.cache, rank.layout.page_tokens
    group = rank.layout.draft
    assert group is not None
    match = cache.match("", request.tokens[:-1])
    tokens = request.tokens[: match.pages * page]
    hidden = hidden_states(decoder, tokens)
    _, expected = dense(decoder, torch.tensor(tokens), hidden)
    for number, at in enumerate(match.tables[group.index]):
        span = slice(number * page, (number + 1) * page)
        torch.testing.assert_close(drafter.keys[0, at], expected.key[span], atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(drafter.values[0, at], expected.value[span], atol=TOLERANCE, rtol=TOLERANCE)
        torch.testing.assert_close(drafter.tails[0, at], hidden[span.stop - 1], atol=TOLERANCE, rtol=TOLERANCE)
    return match.pages


@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
def test_answers_and_cache(decoder: Decoder, sampling: Sampling) -> None:
    """Same answers as without; and what was stored under drafts that held and that did not is what it must be."""
    plain = ParityRank(decoder, pool_tokens=1024, state_slots=14, record=False).generate(prompts(), sampling=sampling)
    rank, drafter = make_rank(decoder)
    drafted = rank.generate(prompts(), sampling=sampling)
    assert {name: request.output for name, request in drafted.items()} == {
        name: request.output for name, request in plain.items()
    }
    stats = rank.scheduler.stats()
    assert sampling is RANDOM or sum(stats.accepted_tokens) > 0
    assert sum(stats.accepted_tokens) < stats.drafted_tokens
    pages = [assert_cache_is_dense(rank, drafter, request, decoder) for request in drafted.values()]
    assert sum(pages) > 16
    assert all(rank.layout.groups[event.group].kind is not GroupKind.DRAFT for event in rank.scheduler.take_events())


def test_the_first_guess_is_that_of_a_dense_pass(decoder: Decoder) -> None:
    """At every step, from a cold cache and behind a cached prefix, it is the likeliest token of dense logits."""
    rank, drafter = make_rank(decoder)
    head = prompts()["c"]
    first = rank.generate({"cold": head}, sampling=GREEDY)["cold"]
    second = rank.generate({"warm": first.tokens[:-5]}, sampling=GREEDY)["warm"]
    assert second.cached_tokens >= 40
    for request in (first, second):
        logits, _ = dense(decoder, torch.tensor(request.tokens), hidden_states(decoder, request.tokens))
        told = {start: drafts for (name, start), drafts in drafter.proposed.items() if name == request.id and drafts}
        assert len(told) > 3
        for start, drafts in told.items():
            assert drafts[0] == int(logits[start].argmax())


def test_pages_too_few(decoder: Decoder) -> None:
    """Preempted and evicted, twice around: the pages of the draft group change hands with the full ones."""
    rank, drafter = make_rank(decoder, pool_tokens=160)
    plain = ParityRank(decoder, pool_tokens=160, state_slots=14, record=False)
    for _ in range(2):
        got, wanted = (each.generate(prompts(), sampling=GREEDY) for each in (rank, plain))
        assert {n: r.output for n, r in got.items()} == {n: r.output for n, r in wanted.items()}
    stats = rank.scheduler.stats()
    draft = rank.layout.draft
    assert draft is not None
    assert stats.evicted_pages[draft.index] == stats.evicted_pages[0] > 10
    assert stats.used_pages[draft.index] == stats.used_pages[0]
    for request in got.values():
        assert_cache_is_dense(rank, drafter, request, decoder)


# --- planted bugs -------------------------------------------------------------------------------------------


def guesses_kept(patch: pytest.MonkeyPatch) -> None:
    """What the head wrote from its own guesses stays, though the model's hidden states are known."""
    observe = HeadDrafter.observe

    def bad(self: HeadDrafter, plan: Plan, hidden: Tensor, ends: Sequence[int]) -> None:
        kept = self.keys.clone(), self.values.clone()
        observe(self, plan, hidden, ends)
        if all(chunk.count > 1 and chunk.request.output for chunk in plan.chunks):
            self.keys.copy_(kept[0])
            self.values.copy_(kept[1])

    patch.setattr(HeadDrafter, "observe", bad)


def tail_of_a_rejected_draft(patch: pytest.MonkeyPatch) -> None:
    """The hidden state that the next chunk goes on from is that of the last draft, whether it held or not."""
    observe = HeadDrafter.observe

    def bad(self: HeadDrafter, plan: Plan, hidden: Tensor, ends: Sequence[int]) -> None:
        observe(self, plan, hidden, [chunk.start + chunk.count for chunk in plan.chunks])

    patch.setattr(HeadDrafter, "observe", bad)


@pytest.mark.parametrize("plant", [guesses_kept, tail_of_a_rejected_draft])
def test_a_planted_bug_is_found(decoder: Decoder, plant: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """The answers stay right, for drafts only cost time; what the cache holds does not."""
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        test_answers_and_cache(decoder, GREEDY)
