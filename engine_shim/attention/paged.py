"""Paged attention on torch: the pools, and one batch's attention over them. The reference for every other kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from engine_shim.attention.host_pages import HostLayer, HostPages
from engine_shim.attention.plan import GroupPlan, KeyPages, Plan, Segment
from engine_shim.offload.barrier import LayerBarrier
from engine_shim.types import CacheGroup, CacheLayout, GroupKind

#: How many tokens a kept copy has room for beyond those it was made of.
_ROOM_TOKENS = 64
#: Bytes of kept copies at most, of one rank; what finds no room is gathered at every step.
_KEPT_BYTES = 256 << 20

#: A layer's keys and values on the host.
Below = tuple[HostLayer, HostLayer]


@dataclass(slots=True)
class _Kept:
    """Copies of a segment's keys and values as of a step, ``[B, tokens, kv_heads, head_dim]``, and their memory."""

    step: int
    copies: tuple[Tensor, Tensor]
    memory: tuple[Tensor, Tensor]


class Gathered:
    """Where the keys and values that attention reads are brought together, each call in the place of the last.

    On the CPU fresh memory costs page faults, which take longer than the copy itself. Of decodes that go on from the
    step before a copy is kept, and each step adds its tokens: from the second such step on, so that those who change
    at every step pay nothing for it. It lies head by head, which torch's kernel reads faster than token by token.
    """

    def __init__(self) -> None:
        self._keys = self._values = torch.empty(0)
        self._kept: dict[tuple[int, int], _Kept] = {}  # by pool and place

    def __call__(
        self, keys: Tensor, values: Tensor, segment: Segment, below: Below | None = None
    ) -> tuple[Tensor, Tensor]:
        """A segment's keys and values, ``[B, L, kv_heads, head_dim]``, of pools ``[pages, page_tokens, ...]``.

        ``below`` has those that have sunk. Good until the next call.
        """
        going_on = segment.going_on
        if going_on is None or not going_on.follows:
            return self._gather(keys, values, segment, below)
        at = (keys.data_ptr(), going_on.place)
        kept = self._kept.get(at)
        if kept is not None and kept.step == going_on.step - 1 and kept.copies[0].shape[1] >= segment.keys.stop:
            for copy, pool in zip(kept.copies, (keys, values), strict=True):
                own = pool.flatten(0, 1).index_select(0, going_on.slots)
                copy.index_put_(going_on.rows_positions, own)
            kept.step = going_on.step
        else:
            gathered = self._gather(keys, values, segment, below)
            memory = self._memory(at, gathered[0], step=going_on.step)
            if memory is None:
                return gathered
            copies = (_by_head(gathered[0], memory[0]), _by_head(gathered[1], memory[1]))
            kept = self._kept[at] = _Kept(going_on.step, copies, memory)
        return kept.copies[0][:, segment.keys], kept.copies[1][:, segment.keys]

    def stored(self, x: Tensor) -> Tensor:
        """Keys or values ``[..., head_dim]`` as they lie in the pools."""
        return x

    def _memory(self, at: tuple[int, int], gathered: Tensor, *, step: int) -> tuple[Tensor, Tensor] | None:
        """Memory for copies of ``gathered`` and a copy's room: what was there, new, or None where all is taken."""
        batch, length, heads, head_dim = gathered.shape
        size = batch * heads * (length + _ROOM_TOKENS) * head_dim
        before = self._kept.pop(at, None)
        if before is not None and before.memory[0].numel() >= size:
            return before.memory
        size += size // 4
        room = _KEPT_BYTES - 2 * size * gathered.element_size()
        if self._kept_bytes() > room:
            self._kept = {at: kept for at, kept in self._kept.items() if kept.step >= step - 1}
        if self._kept_bytes() > room:
            return None
        return gathered.new_empty(size), gathered.new_empty(size)

    def _kept_bytes(self) -> int:
        return sum(2 * kept.memory[0].nbytes for kept in self._kept.values())

    def _gather(self, keys: Tensor, values: Tensor, segment: Segment, below: Below | None) -> tuple[Tensor, Tensor]:
        needed = segment.pages.count * keys[0].numel()
        if self._keys.numel() < needed or self._keys.dtype is not keys.dtype:
            # Contexts grow by a token a step: with room to spare a buffer lasts for many steps.
            self._keys, self._values = (keys.new_empty(needed + needed // 4) for _ in range(2))
        key_layer, value_layer = below or (None, None)
        return (
            fetch(keys, segment.pages, self._keys[:needed], key_layer)[:, segment.keys],
            fetch(values, segment.pages, self._values[:needed], value_layer)[:, segment.keys],
        )


def fetch(pool: Tensor, pages: KeyPages, buffer: Tensor, below: HostLayer | None) -> Tensor:
    """A segment's pages, put into ``buffer``: ``[B, tokens, kv_heads, head_dim]``, with zeros where it is blank."""
    table, blank = pages.placed()
    # Whole pages: a copy of a few long rows is twice as fast as one of many short ones.
    rows, into = pool.view(pool.shape[0], -1), buffer.view(table.numel(), -1)
    if pages.sunk is None:
        torch.index_select(rows, 0, table.view(-1), out=into)
    else:
        assert below is not None, "nothing can be read on the host"
        for part in (slice(0, pages.sunk.first), slice(pages.sunk.end, None)):
            torch.index_select(rows, 0, table[0, part], out=into[part])
        below.fetch(pages.sunk_slots, into[pages.sunk.first : pages.sunk.end])
    if blank is not None:
        buffer.view(-1, pool.shape[2] * pool.shape[3]).index_fill_(0, blank, 0.0)
    return buffer.view(table.shape[0], -1, *pool.shape[2:])


def _by_head(gathered: Tensor, memory: Tensor) -> Tensor:
    """A copy of ``[B, L, kv_heads, head_dim]`` that lies head by head, with zeros in the room behind it."""
    batch, length, heads, head_dim = gathered.shape
    shape = (batch, heads, length + _ROOM_TOKENS, head_dim)
    copy = memory[: math.prod(shape)].view(shape).transpose(1, 2)
    copy[:, :length] = gathered
    copy[:, length:] = 0.0
    return copy


@dataclass(frozen=True, slots=True)
class Pools:
    """Keys and values of one rank, a tensor per attention group: ``[layers, pages, page_tokens, kv_heads, head_dim]``.

    The tensors' contents belong to the runner: a step writes the slots of its own tokens and nothing else, through
    ``of_layer`` alone, which waits for what is being loaded.
    """

    layout: CacheLayout
    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    barrier: LayerBarrier
    gathered: Gathered = field(default_factory=Gathered)
    #: See ``CacheLayout.places``.
    places: dict[int, tuple[CacheGroup, int]] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "places", self.layout.places())

    @classmethod
    def allocate(
        cls,
        layout: CacheLayout,
        *,
        kv_heads: int,
        head_dim: int,
        device: torch.device,
        dtype: torch.dtype,
        barrier: LayerBarrier | None = None,
        gathered: Gathered | None = None,
    ) -> Pools:
        """Zeroed pools for ``layout``; the only allocation of cache memory in the life of a rank."""
        shapes = [
            (len(group.layers), pages, layout.page_tokens, kv_heads, head_dim)
            for group, pages in zip(layout.groups, layout.pages, strict=True)
            if group.kind in (GroupKind.FULL, GroupKind.WINDOW)
        ]
        keys, values = (tuple(torch.zeros(s, device=device, dtype=dtype) for s in shapes) for _ in range(2))
        return cls(layout, keys, values, barrier or LayerBarrier(), gathered or Gathered())

    def of_layer(self, layer: int, group: int, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer, ``[pages, page_tokens, kv_heads, head_dim]``, when its loads have landed."""
        self.barrier.wait(layer)
        return self.keys[group][row], self.values[group][row]


class PagedAttention:
    """Attention of one batch: writes the batch's keys and values into the pools, then reads by the plan.

    ``below`` is where full layers read what has sunk.
    """

    def __init__(self, pools: Pools, plan: Plan, *, scale: float, below: HostPages | None = None) -> None:
        self._pools = pools
        self._plan = plan
        self._scale = scale
        self._below = below

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        pools = self._pools
        group, row = pools.places[layer]
        plan = self._plan.groups[group.index]
        keys, values = pools.of_layer(layer, group.index, row)
        stored = pools.gathered.stored
        write(keys, values, plan, key=stored(key), value=stored(value))
        below = self._below.of_layer(row) if self._below is not None and group.kind is GroupKind.FULL else None
        return attend_all(query, keys, values, plan=plan, scale=self._scale, gathered=pools.gathered, below=below)


def write(keys: Tensor, values: Tensor, plan: GroupPlan, *, key: Tensor, value: Tensor) -> None:
    """Put a batch's own ``[tokens, kv_heads, head_dim]`` into their slots."""
    keys.flatten(0, 1).index_copy_(0, plan.writes, key)
    values.flatten(0, 1).index_copy_(0, plan.writes, value)


def attend_all(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    plan: GroupPlan,
    scale: float,
    gathered: Gathered,
    below: Below | None = None,
) -> Tensor:
    """Attention of a batch: ``query`` ``[tokens, heads, head_dim]`` over pools ``[pages, page_tokens, ...]``."""
    out = torch.empty_like(query)
    for segment in plan.segments:
        k, v = gathered(keys, values, segment, below)
        attended = attend(query[segment.rows], k, v, segment=segment, scale=scale)
        if len(plan.segments) == 1 and isinstance(segment.rows, slice):
            return attended
        out[segment.rows] = attended
    return out


def attend(query: Tensor, keys: Tensor, values: Tensor, *, segment: Segment, scale: float) -> Tensor:
    """Attention of one segment: ``query`` ``[B * C, heads, head_dim]`` in, the same shape out.

    ``keys`` and ``values`` are ``[B, L, kv_heads, head_dim]``. Heads that share a key head (GQA) are laid along the
    batch or the query axis, so that keys and values are never repeated in memory: for decodes they are queries of one
    sequence, for a prefill they are sequences that share one storage.
    """
    batch, _, kv_heads, head_dim = keys.shape
    heads = query.shape[1]
    repeats = heads // kv_heads
    # [B, kv_heads, L, head_dim]
    k, v = keys.transpose(1, 2), values.transpose(1, 2)
    if not segment.blocks:
        q = query.view(batch, kv_heads, repeats, head_dim)
        out = scaled_dot_product_attention(q, k, v, attn_mask=segment.mask, scale=scale)
        return out.reshape(batch, heads, head_dim)
    out = torch.empty_like(query)
    k, v = k.expand(repeats, -1, -1, -1), v.expand(repeats, -1, -1, -1)
    # [repeats, kv_heads, C, head_dim]
    q, laid = (each.view(-1, kv_heads, repeats, head_dim).permute(2, 1, 0, 3) for each in (query, out))
    for block in segment.blocks:
        laid[:, :, block.queries] = scaled_dot_product_attention(
            q[:, :, block.queries],
            k[:, :, block.keys],
            v[:, :, block.keys],
            attn_mask=None if block.mask is None else block.mask[None, None],
            is_causal=block.mask is None,
            scale=scale,
        )
    return out
