"""Runs batches through a decoder over paged pools: the real forward pass of one rank."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from engine_shim.attention.buffers import Buffers
from engine_shim.attention.fp8 import DecodedPages, packed_size
from engine_shim.attention.going_on import Succession
from engine_shim.attention.host_pages import HostPages
from engine_shim.attention.paged import PagedAttention, Pools
from engine_shim.attention.plan import Plan, make_plan
from engine_shim.attention.recurrent import PagedRecurrence, States
from engine_shim.attention.tables import page_tables
from engine_shim.model.decoder import Attention, Decoder
from engine_shim.offload.barrier import LayerBarrier
from engine_shim.runner.steps import Step
from engine_shim.sampling import Sampler
from engine_shim.speculative.drafter import Drafter
from engine_shim.types import Batch, CacheLayout, Chunk, Sampled, StepLanding

if TYPE_CHECKING:
    from engine_shim.attention.flashinfer_attention import FlashInfer
    from engine_shim.runner.graphs import DecodeGraphs


class TorchRunner:
    """One rank's runner. The decoder may be shared with other ranks, the pools and the drafter are its own.

    Device and dtype are the decoder's. Not thread-safe: the rank's thread alone calls it.
    """

    def __init__(
        self,
        decoder: Decoder,
        layout: CacheLayout,
        *,
        drafter: Drafter | None = None,
        barrier: LayerBarrier | None = None,
        kernels: bool = False,
        flashinfer: bool = False,
        fp8: bool = False,
        graph_decodes: int = 0,
        overlaps: bool = False,
    ) -> None:
        """``barrier`` is the one that the drafter waits at, too. With ``kernels`` Triton's attend, not torch; with
        ``flashinfer`` FlashInfer's. ``fp8``: the model's keys and values are kept in eight bits, which the former read.

        Without a drafter, steps of up to ``graph_decodes`` decodes then run as graphs (``graphs``). ``overlaps``: on
        the CPU launched steps run in a thread of their own; CUDA's stream is one already.
        """
        self.decoder = decoder
        self.layout = layout
        self.barrier = barrier or LayerBarrier()
        self.pools = Pools.allocate(
            layout,
            kv_heads=decoder.config.kv_heads,
            head_dim=packed_size(decoder.config.head_dim) if fp8 else decoder.config.head_dim,
            device=decoder.device,
            dtype=torch.uint8 if fp8 else decoder.dtype,
            barrier=self.barrier,
            gathered=DecodedPages(decoder.dtype) if fp8 else None,
        )
        net, group = decoder.config.delta_net, layout.state
        self.states = (
            States.allocate(
                group,
                layout.pages[group.index],
                net=net,
                device=decoder.device,
                dtype=decoder.dtype,
                barrier=self.barrier,
            )
            if net is not None and group is not None
            else None
        )
        self._succession = Succession() if decoder.device.type == "cpu" and not (kernels or fp8) else None
        self._drafter = drafter
        self._kernels = kernels
        self._flashinfer = self._new_flashinfer() if flashinfer else None
        self._graphs = self._new_graphs(graph_decodes) if kernels and graph_decodes and drafter is None else None
        has_stream = not overlaps or decoder.device.type == "cuda"
        self._thread = None if has_stream else ThreadPoolExecutor(1, thread_name_prefix="forward")
        self._newest: Step | None = None
        self._below: HostPages | None = None
        self._sampler = Sampler(stop_token_ids=frozenset(decoder.config.eos_token_ids))

    def read_below(self, host: Buffers) -> None:
        """Have what has sunk read in these pools of the host, which are like ``buffers``."""
        keys, values = host[0]
        self._below = HostPages(keys, values, self.decoder.device)

    def run(self, batch: Batch) -> list[Sampled]:
        """Run one step; the one wait for the device is for the sampled tokens.

        Raises ``LoadError`` where a load of the batch does not arrive.
        """
        return self.launch(batch)()

    def launch(self, batch: Batch) -> StepLanding:
        """See ``LaunchingRunner``. With a drafter, which has to know what held, the step runs when it lands."""
        if self._drafter is not None:
            return functools.partial(self._run_drafted, batch)
        takes_graph = self._graphs is not None and self._graphs.takes(batch)
        plan = None if takes_graph else self._plan(batch, fills_awaited=True)
        step = self._newest = Step(batch, plan, behind=self._newest, device=self.decoder.device)
        if self._thread is None:
            self._forward(step)
        else:
            step.running = self._thread.submit(self._forward, step)
        return step.sampled

    @torch.inference_mode()
    def _forward(self, step: Step) -> None:
        """Run a step's layers and choose its tokens, which on CUDA is to say: have the stream do so."""
        batch, plan = step.batch, step.plan
        self.barrier.expect(batch.loads)
        sampling = [chunk for chunk in batch.chunks if chunk.samples]
        if plan is None:
            assert self._graphs is not None
            logits = self._graphs.logits(batch.chunks, put_awaited=step.put_awaited)
        else:
            step.put_awaited(plan.tokens)
            hidden = self._hidden(plan, self._recurrence(plan))
            if not sampling:
                return
            logits = self.decoder.logits(hidden.index_select(0, plan.sampled))
        step.choice = self._sampler(logits, sampling, ((),) * len(sampling))

    @torch.inference_mode()
    def _run_drafted(self, batch: Batch) -> list[Sampled]:
        self.barrier.expect(batch.loads)
        drafts = self._drafts(batch)
        plan = self._plan(batch, drafts)
        recurrence = self._recurrence(plan)
        hidden = self._hidden(plan, recurrence)
        results = self._sample(hidden.index_select(0, plan.sampled), batch, drafts)
        # Of a chunk those rows count that hold a known token or a draft that held.
        sampled = iter(results)
        held = [max(0, len(next(sampled).tokens) - 1) if chunk.samples else 0 for chunk in batch.chunks]
        if recurrence is not None:
            recurrence.settle(
                [
                    chunk.count + drafts_held
                    for chunk, tried, drafts_held in zip(batch.chunks, drafts, held, strict=True)
                    if tried
                ]
            )
        assert self._drafter is not None
        ends = [chunk.start + chunk.count + more for chunk, more in zip(batch.chunks, held, strict=True)]
        self._drafter.observe(plan, hidden, ends)
        return results

    def _sample(self, hidden: Tensor, batch: Batch, drafts: Sequence[tuple[int, ...]]) -> list[Sampled]:
        sampling = [(chunk, tried) for chunk, tried in zip(batch.chunks, drafts, strict=True) if chunk.samples]
        if not sampling:
            return []
        chunks, tried = zip(*sampling, strict=True)
        return self._sampler(self.decoder.logits(hidden), chunks, tried).sampled()

    @torch.inference_mode()
    def logits(self, batch: Batch) -> Tensor:
        """Run one step and return the logits of every position of the batch, ``[tokens, vocab_size]``."""
        self.barrier.expect(batch.loads)
        plan = self._plan(batch)
        return self.decoder.logits(self._hidden(plan, self._recurrence(plan)))

    @property
    def buffers(self) -> Buffers:
        """What the pages of each group hold."""
        buffers: list[tuple[Tensor, ...]] = list(zip(self.pools.keys, self.pools.values, strict=True))
        if self.states is not None:
            buffers.insert(self.states.group.index, (self.states.inputs, self.states.memories))
        if self._drafter is not None and self._drafter.buffers:
            buffers.append(self._drafter.buffers)
        return tuple(buffers)

    def _drafts(self, batch: Batch) -> list[tuple[int, ...]]:
        """What is tried behind each chunk: nothing where there is no room, and no more than a grammar lets pass."""
        drafts: list[tuple[int, ...]] = [()] * len(batch.chunks)
        roomy = [(i, chunk) for i, chunk in enumerate(batch.chunks) if chunk.room]
        if self._drafter is None or not roomy:
            return drafts
        proposed = self._drafter.propose([chunk for _, chunk in roomy])
        for (i, chunk), tokens in zip(roomy, proposed, strict=True):
            constraint = chunk.request.constraint
            fitting = len(tokens) if constraint is None else constraint.fitting(chunk.request.output, tokens)
            drafts[i] = tokens[:fitting]
        return drafts

    def _plan(
        self, batch: Batch, drafts: Sequence[tuple[int, ...]] | None = None, *, fills_awaited: bool = False
    ) -> Plan:
        return make_plan(
            batch,
            self.layout,
            drafts=drafts,
            fills_awaited=fills_awaited,
            device=self.decoder.device,
            dtype=self.decoder.dtype,
            segments=not (self._kernels or self._flashinfer) or _reads_below(batch.chunks),
            succession=self._succession,
        )

    def _recurrence(self, plan: Plan) -> PagedRecurrence | None:
        net = self.decoder.config.delta_net
        if self.states is None or plan.states is None or net is None:
            return None
        return PagedRecurrence(self.states, plan.states, net=net)

    def _hidden(self, plan: Plan, recurrence: PagedRecurrence | None) -> Tensor:
        return self.decoder.hidden(plan.tokens, plan.positions, attention=self._attention(plan), recurrence=recurrence)

    def _attention(self, plan: Plan) -> Attention:
        scale = self.decoder.config.attention_scale
        if not (self._kernels or self._flashinfer) or _reads_below(plan.chunks):
            return PagedAttention(self.pools, plan, scale=scale, below=self._below)
        if self._flashinfer is not None:
            return self._flashinfer.plan(plan.chunks)
        from engine_shim.attention.kernel_attention import KernelAttention  # imports triton

        tables = page_tables(plan.chunks, self.layout, device=self.decoder.device)
        return KernelAttention(self.pools, tables, scale=scale)

    def _new_flashinfer(self) -> FlashInfer:
        from engine_shim.attention.flashinfer_attention import FlashInfer  # imports flashinfer

        return FlashInfer(self.pools, heads=self.decoder.config.heads, scale=self.decoder.config.attention_scale)

    def _new_graphs(self, largest: int) -> DecodeGraphs:
        from engine_shim.runner.graphs import DecodeGraphs  # imports triton

        return DecodeGraphs(self.decoder, self.pools, self.states, largest=largest)


def _reads_below(chunks: Sequence[Chunk]) -> bool:
    """Whether torch has to attend: kernels read no other pages than the device's."""
    return any(chunk.sunk is not None for chunk in chunks)
