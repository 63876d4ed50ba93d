"""One rank's time: every expected second is worked out from the published rates."""

from __future__ import annotations

import pytest

from loadtest.simulate.engine import Engine, Job, Listener, prefill_work
from loadtest.simulate.runs import Run

BLOCK = 64


class Bench:
    """An engine and a record of when things happened."""

    def __init__(
        self,
        *,
        pool_blocks: int = 10_000,
        slowdown: float = 1.0,
        host_blocks: int = 0,
        window_blocks: int = 0,
        window_pool_blocks: int = 0,
    ) -> None:
        self.first: dict[Job, float] = {}
        self.last: dict[Job, float] = {}
        self.now = 0.0
        self.engine = Engine(
            Listener(
                first_token=lambda job: self.first.__setitem__(job, self.engine.now),
                finished=lambda job: self.last.__setitem__(job, self.engine.now),
                stored=lambda run, blocks: None,
                loadable=lambda run, blocks: None,
                windowed=lambda run, span: None,
            ),
            pool_blocks=pool_blocks,
            host_blocks=host_blocks,
            block_tokens=BLOCK,
            slowdown=slowdown,
            window_blocks=window_blocks,
            window_pool_blocks=window_pool_blocks,
        )

    def submit(self, run: Run, blocks: int, *, output_tokens: int = 1, at: float = 0.0) -> Job:
        self.engine.advance(at)
        job = Job(((run, blocks),), blocks * BLOCK, output_tokens)
        self.engine.submit(job)
        return job


def test_prefill_runs_at_the_published_rates() -> None:
    """22,000 tokens a second at a context's start; the last token of 100,000 at 15,000."""
    assert prefill_work(10, 10) == pytest.approx(10 / 22_000, rel=1e-4)
    assert prefill_work(1, 100_000) == pytest.approx(1 / 15_000, rel=1e-4)


def test_prompts_are_computed_one_after_another() -> None:
    """Two cold prompts at a tenth of the speed: the second waits for the first, which decodes meanwhile in 22 ms steps.

    With one reply running, 150 ms of prefill alternate with a step of 22.1 ms and a little for its context.
    """
    bench = Bench(slowdown=10.0)
    one = bench.submit(Run(), 100, output_tokens=10_000)
    two = bench.submit(Run(), 100)
    bench.engine.advance(1000.0)

    alone = 10 * prefill_work(6400, 6400)
    step = 0.022 + 0.0001 + 6400 * 1e-8
    assert bench.first[one] == pytest.approx(alone)
    assert bench.first[two] == pytest.approx(alone + alone * (0.15 + step) / 0.15)


def test_replies_slow_one_another_a_little() -> None:
    """One reply of 101 tokens: a hundred steps of 22.1 ms and 10 ns a token of context after its prefill."""
    bench = Bench()
    job = bench.submit(Run(), 100, output_tokens=101)
    bench.engine.advance(100.0)

    assert bench.last[job] - bench.first[job] == pytest.approx(100 * (0.022 + 0.0001 + 6400 * 1e-8))


def test_what_is_cached_is_not_computed() -> None:
    """A second prompt of the same 100 blocks computes its last block only, since the last token always is."""
    bench = Bench()
    run = Run()
    bench.submit(run, 100)
    again = bench.submit(run, 100, at=10.0)
    bench.engine.advance(20.0)

    assert again.cached_tokens == 99 * BLOCK
    assert again.work == pytest.approx(prefill_work(BLOCK, 100 * BLOCK))


def test_the_host_tier_loads_at_a_fifth_of_the_time() -> None:
    """A pool of 150 blocks lost 100 of them to another prompt; the host tier still has them."""
    bench = Bench(pool_blocks=150, host_blocks=600)
    run = Run()
    bench.submit(run, 100)
    bench.submit(Run(), 148, at=10.0)
    again = bench.submit(run, 100, at=20.0)
    bench.engine.advance(40.0)

    whole, rest = prefill_work(6400, 6400), prefill_work(BLOCK, 6400)
    cached = again.cached_tokens
    assert cached < 10 * BLOCK
    assert again.work == pytest.approx(rest + 0.2 * (prefill_work(6400 - cached, 6400) - rest))
    assert again.work < 0.3 * whole
    assert again.loaded_tokens == 99 * BLOCK - cached


def test_a_prompt_that_does_not_fit_blocks_those_behind_it() -> None:
    """90 of 100 blocks are in use; 20 wait until they are free, and 1 block waits behind them."""
    bench = Bench(pool_blocks=100)
    long = bench.submit(Run(), 90, output_tokens=200)
    large = bench.submit(Run(), 20)
    small = bench.submit(Run(), 1)
    bench.engine.advance(1000.0)

    assert bench.last[long] < bench.first[large] < bench.first[small]
    bench.engine.cache.check()


def test_a_restart_loses_everything() -> None:
    """What ran and what waited is returned, and the cache is empty."""
    bench = Bench()
    jobs = [bench.submit(Run(), 100, output_tokens=1000, at=0.1) for _ in range(3)]
    bench.engine.advance(0.5)
    lost = bench.engine.empty()

    assert set(lost) == set(jobs)
    assert bench.engine.cache.used == 0
    assert bench.engine.next_event() == float("inf")


def test_a_hit_needs_the_last_window_too() -> None:
    """The window pool has room for two windows: when two more conversations have passed, the first is computed again.

    The full-attention layers hold all of them all the time.
    """
    bench = Bench(window_blocks=16, window_pool_blocks=32)
    one = Run()
    for run, at in ((one, 0.0), (Run(), 10.0), (Run(), 20.0)):
        bench.submit(run, 100, at=at)
    again = bench.submit(one, 130, at=30.0)
    bench.engine.advance(40.0)

    assert bench.engine.cache.match(again.path) == 130
    assert again.cached_tokens == 0


def test_a_longer_prompt_resumes_at_the_window_that_the_one_before_left() -> None:
    """100 blocks, then 130: 100 are reused, as if all layers had full attention."""
    bench = Bench(window_blocks=16, window_pool_blocks=32)
    run = Run()
    jobs = [bench.submit(run, blocks, at=at) for blocks, at in ((100, 0.0), (130, 10.0))]
    bench.engine.advance(20.0)

    assert [job.cached_tokens for job in jobs] == [0, 100 * BLOCK]
