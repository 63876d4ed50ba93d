"""Decode steps launched as one: their inputs stand at fixed addresses, and on CUDA each batch size is a captured graph.

A step of n sequences runs as one of the next power of two. All that differs between steps is read from the inputs by
the kernels: token ids, positions, lengths, page tables, slots. A place that no sequence fills has length 0: it attends
to nothing and writes to the null page, so that a warm-up or a capture touches nobody's pages. On the CPU the same
inputs are run by a plain call in place of a replay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from engine_shim.attention.kernel_attention import KernelAttention
from engine_shim.attention.paged import Pools
from engine_shim.attention.plan import StatePlan
from engine_shim.attention.recurrent import PagedRecurrence, States
from engine_shim.attention.tables import GroupTable, PageTables, attention_groups, page_tables
from engine_shim.model.decoder import Decoder
from engine_shim.placing import to_device
from engine_shim.types import NULL_PAGE, Batch, CacheLayout, Chunk

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

#: Passes before a capture: kernels are compiled and libraries make their workspaces then.
_WARM_UPS = 2


class DecodeInputs:
    """What a decode step of up to ``size`` sequences reads, in tensors that are made once and filled anew each step."""

    def __init__(self, layout: CacheLayout, *, size: int, max_context_tokens: int, device: torch.device) -> None:
        """``max_context_tokens`` bounds the page tables, as the pool does."""
        self._layout = layout
        self._size = size
        width = min(layout.pages[0], -(-max_context_tokens // layout.page_tokens))
        places = torch.arange(size, device=device)

        def ids() -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        self.tokens = ids()
        self.positions = ids()
        self.tables = PageTables(
            query_starts=torch.arange(size + 1, dtype=torch.int32, device=device),
            lengths=torch.zeros(size, dtype=torch.int32, device=device),
            decodes=places.to(torch.int32),
            extends=torch.empty(0, dtype=torch.int32, device=device),
            longest=1,
            groups=tuple(
                GroupTable(
                    writes=ids(),
                    pages=torch.zeros(size, width, dtype=torch.int32, device=device),
                    starts=torch.zeros(size, dtype=torch.int32, device=device),
                )
                for _ in attention_groups(layout)
            ),
        )
        self.states = StatePlan(
            sources=ids(),
            targets=ids(),
            fresh=torch.ones(size, dtype=torch.bool, device=device),
            parts=((places, places),),
            firm=places,
            drafted=(),
        )

    def fill(self, chunks: Sequence[Chunk]) -> None:
        """Put decodes in the first places, and nobody in the others. Tokens that are awaited are 0."""
        tables = page_tables(chunks, self._layout, device=torch.device("cpu"))
        self._put(self.tokens, [0 if chunk.awaits_token else chunk.request.tokens[chunk.start] for chunk in chunks])
        self._put(self.positions, [chunk.start for chunk in chunks])
        self._put(self.tables.lengths, tables.lengths)
        for mine, theirs in zip(self.tables.groups, tables.groups, strict=True):
            self._put(mine.writes, theirs.writes)
            self._put(mine.starts, theirs.starts)
            # What stands behind a length is not read.
            rows, width = theirs.pages.shape
            mine.pages[:rows, :width].copy_(to_device(theirs.pages, mine.pages.device))
        if self._layout.state is not None:
            slots = np.array([chunk.tables[self._layout.state.index] for chunk in chunks], dtype=np.int64)
            self._put(self.states.sources, slots[:, 0])
            self._put(self.states.targets, slots[:, 1])
            self._put(self.states.fresh, slots[:, 0] == NULL_PAGE, empty=1)

    def _put(self, target: Tensor, values: object, *, empty: int = 0) -> None:
        values = torch.as_tensor(values)
        padded = torch.full((self._size,), empty, dtype=target.dtype)
        padded[: len(values)] = values
        target.copy_(to_device(padded, target.device))


@dataclass(frozen=True, slots=True)
class _Step:
    """One size: its inputs, and what runs them to logits ``[size, vocab_size]``."""

    inputs: DecodeInputs
    replay: Callable[[], Tensor]


class DecodeGraphs:
    """The decode steps of one rank; not thread-safe. Logits are good until the next step."""

    def __init__(self, decoder: Decoder, pools: Pools, states: States | None, *, largest: int) -> None:
        """Batches of up to ``largest`` decodes are taken; a size is captured when it is first needed."""
        self._decoder = decoder
        self._pools = pools
        self._states = states
        self._largest = largest
        self._steps: dict[int, _Step] = {}
        self._memory: _POOL_HANDLE | None = None

    @property
    def sizes(self) -> list[int]:
        """Batch sizes met so far."""
        return sorted(self._steps)

    def takes(self, batch: Batch) -> bool:
        """Whether a batch is of decodes alone, few enough, and waits for no load: inside a graph nobody can wait."""
        fits = 0 < len(batch.chunks) <= self._largest and not batch.loads
        return fits and all(chunk.count == 1 and chunk.samples and chunk.sunk is None for chunk in batch.chunks)

    def logits(self, chunks: Sequence[Chunk], *, put_awaited: Callable[[Tensor], None]) -> Tensor:
        """Run one step of decodes: ``[chunks, vocab_size]``. ``put_awaited`` gets the token ids to complete."""
        size = min(1 << (len(chunks) - 1).bit_length(), self._largest)
        step = self._steps.get(size)
        if step is None:
            step = self._steps[size] = self._make(size)
        step.inputs.fill(chunks)
        put_awaited(step.inputs.tokens)
        return step.replay()[: len(chunks)]

    def _make(self, size: int) -> _Step:
        decoder = self._decoder
        inputs = DecodeInputs(
            self._pools.layout,
            size=size,
            max_context_tokens=decoder.config.max_positions,
            device=decoder.device,
        )
        attention = KernelAttention(self._pools, inputs.tables, scale=decoder.config.attention_scale)
        net = decoder.config.delta_net
        recurrence = None
        if self._states is not None and net is not None:
            recurrence = PagedRecurrence(self._states, inputs.states, net=net)

        def forward() -> Tensor:
            hidden = decoder.hidden(inputs.tokens, inputs.positions, attention=attention, recurrence=recurrence)
            return decoder.logits(hidden)

        return _Step(inputs, self._capture(forward) if decoder.device.type == "cuda" else forward)

    def _capture(self, forward: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """A replay of ``forward``. Other threads may use the device meanwhile: other ranks, and what moves pages."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(current)
        with torch.cuda.stream(side):
            for _ in range(_WARM_UPS):
                forward()
        current.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode="thread_local"):
            logits = forward()
        self._memory = graph.pool()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
