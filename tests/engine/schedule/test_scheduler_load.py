"""Agent-like traffic through pools that are far too small: right answers, and proof that the pools were too small."""

from __future__ import annotations

import random

import pytest
from kv_memory import EOS, KvMemory, expected_output

from engine_shim.schedule.scheduler import Scheduler
from engine_shim.types import CacheGroup, CacheLayout, FinishReason, GroupKind, Request, Sampling


@pytest.mark.parametrize("seed", range(4))
def test_outputs_equal_those_of_an_unlimited_cache(seed: int) -> None:
    """Conversations that fork, overlap and are aborted answer exactly what they would answer alone."""
    rng = random.Random(seed)
    page, window = rng.choice([(4, 10), (8, 8), (3, 17), (16, 40)])
    groups = (CacheGroup(0, GroupKind.FULL, (1,)), CacheGroup(1, GroupKind.WINDOW, (0,), window))
    layout = CacheLayout(page, groups, (480 // page, 240 // page))
    scheduler = Scheduler(
        layout, max_running=8, chunk_tokens=48, max_context_tokens=400, eos_token_ids=frozenset({EOS})
    )
    memory = KvMemory(layout)
    histories: list[tuple[int, ...]] = [tuple(rng.randrange(11) for _ in range(60)) for _ in range(2)]
    streams: dict[str, list[int]] = {}
    finished: dict[str, FinishReason] = {}
    requests: dict[str, Request] = {}
    hits = 0
    while len(finished) < 200:
        if len(requests) < 200 and rng.random() < 0.4:
            history = rng.choice(histories[-6:])
            cut = len(history) if rng.random() < 0.8 else rng.randrange(20, len(history) + 1)
            prompt = history[:cut][:300] + tuple(rng.randrange(11) for _ in range(rng.randint(1, 40)))
            sampling = Sampling(max_tokens=rng.randint(1, 40), ignore_eos=rng.random() < 0.7)
            request = Request(str(len(requests)), prompt, sampling)
            requests[request.id], streams[request.id] = request, []
            scheduler.add(request)
        batch = scheduler.schedule()
        outputs = []
        victim = str(rng.randrange(len(requests) + 1))
        if rng.random() < 0.05:
            scheduler.abort(victim)
        if batch is not None:
            outputs = scheduler.commit(batch, memory.run(batch))
        scheduler.check_integrity()
        scheduler.take_events()
        for output in [*outputs, *scheduler.drain_outputs()]:
            request = output.request
            streams[request.id] += output.tokens
            if output.finish is not None:
                finished[request.id] = output.finish
                hits += request.cached_tokens
                histories.append(tuple(request.tokens))
    for name, request in requests.items():
        answer, reason = expected_output(request.prompt, request.sampling, context_tokens=400)
        if finished[name] is FinishReason.ABORT:
            assert streams[name] == answer[: len(streams[name])]
        else:
            assert (streams[name], finished[name]) == (answer, reason)
    stats = scheduler.stats()
    assert stats.used_pages == stats.evictable_pages
    assert stats.preemptions > 0
    assert min(stats.evicted_pages) > 0
    assert memory.window_pages_reused > 0
    assert stats.cached_tokens == hits > 0
