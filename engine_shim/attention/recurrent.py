"""Gated delta nets over cached states: the pools of states, and one batch's run through them (torch).

Each head's memory is a matrix S of shape ``[key_dim, value_dim]``. One token with key k, value v, decay a and strength
b replaces what the memory says about k: ``S <- a S + b k (v - (a S)^T k)^T``, and reads ``S^T q``. Before that a causal
convolution mixes each channel with the tokens just before, so its last inputs are part of the state.
Source: Yang et al., Gated Delta Networks (2024); the chunked form is that of transformers' Qwen3-Next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - torch's own name for it

from engine_shim.attention.plan import StatePlan
from engine_shim.model.config import DeltaNet
from engine_shim.offload.barrier import LayerBarrier
from engine_shim.types import CacheGroup

#: Tokens that one triangular solve takes.
_BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class States:
    """All states of one rank: ``inputs`` ``[layers, slots, channels, kernel - 1]`` of the model's type, ``memories``
    ``[layers, slots, value_heads, key_dim, value_dim]`` in float32, which rounding over long decodes would wear out.
    A step reads and writes them through ``of_layer`` alone, which waits for what is being loaded.
    """

    group: CacheGroup
    inputs: Tensor
    memories: Tensor
    barrier: LayerBarrier

    @classmethod
    def allocate(
        cls,
        group: CacheGroup,
        slots: int,
        *,
        net: DeltaNet,
        device: torch.device,
        dtype: torch.dtype,
        barrier: LayerBarrier | None = None,
    ) -> States:
        """Zeroed states; the only allocation of them in the life of a rank."""
        layers = len(group.layers)
        memory = (layers, slots, net.value_heads, net.key_dim, net.value_dim)
        return cls(
            group=group,
            inputs=torch.zeros(layers, slots, net.channels, net.kernel - 1, device=device, dtype=dtype),
            memories=torch.zeros(memory, device=device, dtype=torch.promote_types(dtype, torch.float32)),
            barrier=barrier or LayerBarrier(),
        )

    def of_layer(self, layer: int, row: int) -> tuple[Tensor, Tensor]:
        """Inputs and memories of one layer, ``[slots, ...]`` each, when its loads have landed."""
        self.barrier.wait(layer)
        return self.inputs[row], self.memories[row]


@dataclass(frozen=True, slots=True)
class _Inputs:
    """What one layer was given for a batch; rows are the batch's."""

    mixed: Tensor
    conv: Tensor
    log_decay: Tensor
    strength: Tensor


class PagedRecurrence:
    """The recurrent layers of one batch: reads each chunk's state, runs its tokens, writes the state after them.

    Where a chunk has drafts its state is written by ``settle``, once it is known which of them hold: what the layers
    were given is run again, up to there. That costs no projection, and no state is kept for every draft.
    """

    def __init__(self, states: States, plan: StatePlan, *, net: DeltaNet) -> None:
        self._states = states
        self._plan = plan
        self._net = net
        self._rows = {layer: row for row, layer in enumerate(states.group.layers)}
        self._given: dict[int, _Inputs] = {}

    def __call__(self, layer: int, mixed: Tensor, *, conv: Tensor, log_decay: Tensor, strength: Tensor) -> Tensor:
        plan, pools = self._plan, self._states.of_layer(layer, self._rows[layer])
        inputs, memories = (_read(pool, plan) for pool in pools)
        given = _Inputs(mixed, conv, log_decay, strength)
        out = mixed.new_empty(mixed.shape[0], self._net.value_heads, self._net.value_dim)
        # Decodes run side by side, each prefill chunk by itself.
        for members, rows in plan.parts:
            read, inputs[members], memories[members] = self._run(given, rows, inputs[members], memories[members])
            out[rows] = read.transpose(1, 2).flatten(0, 1).to(out.dtype)
        for pool, states in zip(pools, (inputs, memories), strict=True):
            pool.index_copy_(0, plan.targets[plan.firm], states[plan.firm])
        if plan.drafted:
            self._given[layer] = given
        return out

    def settle(self, counts: Sequence[int]) -> None:
        """Write the states of the chunks with drafts: of each as many rows count as ``counts`` says, in order."""
        for layer, given in self._given.items():
            pools = self._states.of_layer(layer, self._rows[layer])
            inputs, memories = (_read(pool, self._plan) for pool in pools)
            for (chunk, rows), count in zip(self._plan.drafted, counts, strict=True):
                one = slice(chunk, chunk + 1)
                kept = slice(rows.start, rows.start + count)
                _, *states = self._run(given, kept, inputs[one], memories[one])
                for pool, state in zip(pools, states, strict=True):
                    pool.index_copy_(0, self._plan.targets[one], state)

    def _run(
        self, given: _Inputs, rows: Tensor | slice, inputs: Tensor, memories: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run rows, equally many of each state: what was read ``[states, heads, count, dim]``, and the states after."""
        mixed, conv = given.mixed[rows], given.conv
        count = mixed.shape[0] // inputs.shape[0]
        window = torch.cat((inputs, mixed.view(-1, count, mixed.shape[1]).transpose(1, 2)), dim=2)
        convolved = F.silu(F.conv1d(window, conv[:, None], groups=conv.shape[0])).transpose(1, 2)
        query, key, value = (part.to(memories.dtype) for part in _heads(convolved, self._net))
        log_decay, strength = (
            gate[rows].view(-1, count, gate.shape[1]).transpose(1, 2).to(memories.dtype)
            for gate in (given.log_decay, given.strength)
        )
        read, memories = delta_rule(
            _unit(query) * self._net.key_dim**-0.5,
            _unit(key),
            value,
            log_decay=log_decay,
            strength=strength,
            memory=memories,
        )
        return read, window[:, :, count:], memories


def delta_rule(
    query: Tensor, key: Tensor, value: Tensor, *, log_decay: Tensor, strength: Tensor, memory: Tensor
) -> tuple[Tensor, Tensor]:
    """Run queries, keys and values ``[batch, heads, tokens, dim]`` from ``memory``: what was read, the memory after.

    Tokens go in blocks. Within one, each token's correction depends on those before it: a unit lower triangular system.
    """
    reads = []
    for q, k, v, g, b in zip(
        *(torch.split(tensor, _BLOCK_TOKENS, dim=2) for tensor in (query, key, value, log_decay, strength)), strict=True
    ):
        total = g.cumsum(-1)
        decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        decayed = total.exp()[..., None]
        system = (k * b[..., None]) @ k.mT * decay
        wanted = b[..., None] * (v - (k * decayed) @ memory)
        corrections = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
        reads.append((q * decayed) @ memory + (q @ k.mT * decay) @ corrections)
        to_end = (total[..., -1:] - total).exp()[..., None]
        memory = memory * decayed[..., -1:, :] + (k * to_end).mT @ corrections
    return torch.cat(reads, dim=2), memory


def _heads(mixed: Tensor, net: DeltaNet) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values out of ``[batch, tokens, channels]``, ``[batch, value_heads, tokens, dim]`` each."""
    keys = net.key_heads * net.key_dim
    query, key, value = torch.split(mixed, [keys, keys, net.value_heads * net.value_dim], dim=-1)
    shape = mixed.shape[:2]
    repeats = net.value_heads // net.key_heads
    query, key = (part.reshape(*shape, net.key_heads, -1).repeat_interleave(repeats, dim=2) for part in (query, key))
    value = value.reshape(*shape, net.value_heads, -1)
    return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def _read(pool: Tensor, plan: StatePlan) -> Tensor:
    """A copy of each chunk's state; zero where there is none, whatever stands in the null slot."""
    states = pool.index_select(0, plan.sources)
    return states.masked_fill_(plan.fresh.view(-1, *[1] * (states.dim() - 1)), 0)
