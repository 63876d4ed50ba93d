"""Drafts of a draft head: one more layer, which guesses the next token but one from what the model just computed.

At position p it is given the embedding of token p and the model's hidden state at p - 1, and guesses token p + 1. So
what it caches at a position depends on nothing behind it, and a page of it is worth as much to every prompt with that
prefix as a page of the model itself. The hidden state before a page is in no cache of the model, so the last one of
each page is kept with the draft group's page.

::

    position        p-1       p         p+1       p+2
    hidden state    h         -         -         -        the last one the model has computed
    token           x         x         d         d        x: known, d: drafts
    the head        (done)    h,x -> d  g,d -> d           g: its own output stands in for the model's hidden state

When the model has run the drafts, the head's keys and values of those that hold are written again, from the model's own
hidden states: nothing that was guessed on a guess stays in the cache.
Source: Gloeckle et al., Multi-token prediction (2024); Li et al., EAGLE (2024); weights as in Qwen3-Next's "mtp".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from engine_shim.attention.paged import Gathered, attend_all, write
from engine_shim.attention.plan import GroupPlan, Plan, group_plan, group_writes
from engine_shim.model.decoder import Decoder, Weights
from engine_shim.model.norm import normed
from engine_shim.offload.barrier import LayerBarrier
from engine_shim.types import CacheLayout, Chunk


class _HeadAttention:
    """The head's own pool of keys and values, as one batch writes and reads it. Without segments it only writes."""

    def __init__(self, keys: Tensor, values: Tensor, plan: GroupPlan, *, scale: float, gathered: Gathered) -> None:
        self._keys, self._values = keys, values
        self._plan = plan
        self._scale = scale
        self._gathered = gathered

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        write(self._keys, self._values, self._plan, key=key, value=value)
        if not self._plan.segments:
            return torch.zeros_like(query)
        scale, gathered = self._scale, self._gathered
        return attend_all(query, self._keys, self._values, plan=self._plan, scale=scale, gathered=gathered)


class HeadDrafter:
    """One rank's draft head; see ``Drafter``. The weights are the decoder's, the cache is its own.

    ``keys`` and ``values`` are ``[1, pages, page_tokens, kv_heads, head_dim]``, ``tails`` ``[1, pages, hidden_size]``
    is the hidden state at the last position of each page that counts. All are read when ``barrier`` lets the head's
    layer, the one behind the model's last, pass.
    """

    def __init__(self, decoder: Decoder, layout: CacheLayout, *, barrier: LayerBarrier | None = None) -> None:
        """Raises ``ValueError`` for a model without a draft head, or a layout without a group for it."""
        weights, group = decoder.weights.draft, layout.draft
        if weights is None or group is None:
            raise ValueError("a draft head needs weights and a cache group")
        config = decoder.config
        layer = next(layer for layer in config.layers if layer.window_tokens is None and not layer.recurrent)
        self._decoder = decoder
        self._weights = weights
        self._group = group
        self._page = layout.page_tokens
        self._layer = Decoder(
            replace(config, layers=(layer,)),
            Weights(decoder.weights.embedding, (weights.layer,), weights.final_norm, decoder.weights.head),
        )
        self._barrier = barrier or LayerBarrier()
        self._gathered = Gathered()
        shape = (1, layout.pages[group.index], layout.page_tokens, config.kv_heads, config.head_dim)
        self.keys, self.values = (torch.zeros(shape, device=decoder.device, dtype=decoder.dtype) for _ in range(2))
        self.tails = torch.zeros(1, shape[1], config.hidden_size, device=decoder.device, dtype=decoder.dtype)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """See ``Drafter``."""
        return self.keys, self.values, self.tails

    @torch.inference_mode()
    def propose(self, chunks: Sequence[Chunk]) -> list[tuple[int, ...]]:
        """See ``Drafter``. Greedy, one pass through the head for each place."""
        order = sorted(range(len(chunks)), key=lambda i: -chunks[i].room)
        alive = [chunks[i] for i in order]
        tokens = self._ids([chunk.request.tokens[chunk.start] for chunk in alive])
        hidden = self._before(alive)
        guessed: list[Tensor] = []
        for place in range(alive[0].room):
            alive = [chunk for chunk in alive if chunk.room > place]
            here = [replace(chunk, start=chunk.start + place, count=1) for chunk in alive]
            plan = group_plan(
                here, self._group, page_tokens=self._page, device=self._decoder.device, dtype=self._decoder.dtype
            )
            positions = self._ids([chunk.start for chunk in here])
            hidden = self._run(tokens[: len(here)], hidden[: len(here)], positions, plan)
            tokens = self._layer.read_out(hidden).argmax(dim=-1)
            guessed.append(tokens)
        columns = [column.tolist() for column in guessed]
        drafts: list[tuple[int, ...]] = [()] * len(chunks)
        for row, i in enumerate(order):
            drafts[i] = tuple(column[row] for column in columns[: chunks[i].room])
        return drafts

    @torch.inference_mode()
    def observe(self, plan: Plan, hidden: Tensor, ends: Sequence[int]) -> None:
        """See ``Drafter``. Writes keys and values, and what the next chunk or another prompt goes on from."""
        normed = self._decoder.normed(hidden)
        counts = [chunk.count for chunk in plan.chunks]
        firsts = [sum(counts[:i]) for i in range(len(counts))]
        before = torch.cat((normed[:1], normed[:-1]))
        before[firsts] = self._before(plan.chunks)
        writes = group_writes(plan.chunks, self._group, page_tokens=self._page, device=self._decoder.device)
        # Of one layer keys and values follow from its input alone: nothing is attended to.
        self._run(plan.tokens, before, plan.positions, GroupPlan(writes=writes, segments=()))
        pages, rows = [], []
        for chunk, first, end in zip(plan.chunks, firsts, ends, strict=True):
            for number in range(max(chunk.start, chunk.rebuilt_until) // self._page, -(-end // self._page)):
                pages.append(chunk.tables[self._group.index][number])
                rows.append(first + min((number + 1) * self._page, end) - 1 - chunk.start)
        self.tails[0].index_copy_(0, self._ids(pages), normed[self._ids(rows)])

    def _run(self, tokens: Tensor, before: Tensor, positions: Tensor, plan: GroupPlan) -> Tensor:
        """The head's output, normed, for tokens and the hidden states before them."""
        weights, layer = self._weights, self._layer
        x = torch.cat(
            (normed(layer.embed(tokens), weights.embedding_norm), normed(before, weights.hidden_norm)), dim=-1
        )
        self._barrier.wait(self._group.layers[0])
        scale = self._decoder.config.attention_scale
        attention = _HeadAttention(self.keys[0], self.values[0], plan, scale=scale, gathered=self._gathered)
        return layer.normed(layer.run(F.linear(x, weights.mix), positions, attention=attention))

    def _before(self, chunks: Sequence[Chunk]) -> Tensor:
        """The model's hidden state just before each chunk; zeros before the first token."""
        pages = [
            chunk.tables[self._group.index][(chunk.start - 1) // self._page] if chunk.start else 0 for chunk in chunks
        ]
        first = self._ids([chunk.start for chunk in chunks]) == 0
        self._barrier.wait(self._group.layers[0])
        return self.tails[0, self._ids(pages)].masked_fill(first[:, None], 0.0)

    def _ids(self, numbers: Sequence[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._decoder.device)
