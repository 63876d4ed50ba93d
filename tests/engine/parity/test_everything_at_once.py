"""Everything a rank does at once, at random: steps ahead beside drafts, copies, forks, aborts and steps that fail.

Each answer is, to the last bit of its logprobs, that of a rank which is asked nothing else. Arithmetic is exact
(``exact_arithmetic``), so nothing but a wrong slot, state or token can make a difference.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from exact_arithmetic import exact_arithmetic  # noqa: F401 - a fixture
from overlapped_rank import OverlappedOffloadRank
from parity_rank import ParityRank
from test_speculative import HalfRight
from tiny_models import make_tiny_model

from engine_shim.cache.integrity import IntegrityError
from engine_shim.cache.transfers import LoadError, WritePolicy
from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.tokenizer import read_card
from engine_shim.schedule.held_back import HeldBack
from engine_shim.types import Batch, FinishReason, Output, Request, Sampled, Sampling, TokenLogprob, WindowTails

SCHEDULES, STEPS_AT_MOST = 12, 20_000


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3_next"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    tiny = make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    return load_decoder(read_card(str(tiny.folder)), dtype=torch.float64)


class PlantedError(RuntimeError):
    """A step that fails on its way through the layers."""


class Rank(OverlappedOffloadRank):
    """Driven as an engine drives it, aborts in flight included; some of its layers raise."""

    def __init__(self, decoder: Decoder, rng: random.Random, folder: Path) -> None:
        self.rng, self.seen, self.answers = rng, Counter[str](), dict[str, list[int]]()
        windows = any(layer.window_tokens is not None for layer in decoder.config.layers)
        tails = rng.choice(list(WindowTails)) if windows else WindowTails.STORED
        drafts, disk = rng.random() < 0.25, rng.random() < 0.4
        super().__init__(
            decoder,
            overlaps=rng.random() < 0.8,
            pool_tokens=rng.choice([112, 160, 240]),
            window_pool_tokens=300 if tails is WindowTails.RING else rng.choice([64, 120, 200]),
            state_slots=rng.choice([7, 9, 14]),
            chunk_tokens=rng.choice([9, 16, 24, 40, 64]),
            max_running=rng.choice([2, 3, 5]),
            window_tails=tails,
            drafter=HalfRight(self.answers) if drafts else None,
            draft_tokens=3 if drafts else 0,
            host_ratio=1.2 if disk else rng.choice([1.5, 6.0]),
            disk_ratio=8.0 if disk else None,
            folder=folder if disk else None,
            policy=rng.choice(list(WritePolicy)),
            piece_pages=rng.randint(1, 12),
        )
        faults = rng.choice([0.0, 0.0, 0.004, 0.01])
        barrier, wait = self.runner.barrier, self.runner.barrier.wait

        def faulty(layer: int) -> None:
            if rng.random() < faults:
                raise LoadError("planted") if barrier._expected else PlantedError("planted")
            wait(layer)

        barrier.wait = faulty
        self.logprobs: dict[str, list[TokenLogprob]] = {}

    def launch(self, batch: Batch) -> None:
        try:
            super().launch(batch)
        except (PlantedError, LoadError) as error:
            failed = error

            def landing() -> list[Sampled]:
                raise failed

            self.flights.append((batch, landing))

    def step(self) -> None:
        batch = self.scheduler.schedule()
        if batch is None:
            self.take([])
            if self.scheduler.has_work:
                assert self.scheduler.awaits_transfers, "requests wait, nothing runs and nothing moves"
                time.sleep(0.001)
            return
        self.launch(batch)
        while self.flights:
            ahead = self.scheduler.schedule_ahead() if self.overlaps and len(self.flights) == 1 else None
            if ahead is not None:
                self.ahead += 1
                self.launch(ahead)
            if self.rng.random() < 0.02:
                self.scheduler.abort(self.rng.choice(batch.chunks).request.id)
            self.land()

    def land(self) -> None:
        batch, landing = self.flights.popleft()
        try:
            outputs = self.scheduler.commit(batch, landing())
        except LoadError:
            self.seen["rewound"] += 1
            outputs = self.scheduler.rewind(batch)
        except PlantedError:
            self.seen["failed"] += 1
            while self.flights:  # they count for nothing, however they end
                with contextlib.suppress(PlantedError, RuntimeError):
                    self.flights.popleft()[1]()
            outputs = self.scheduler.fail(batch)
        self.take(outputs)
        self.scheduler.check_integrity()

    def take(self, outputs: list[Output]) -> None:
        for output in (*outputs, *self.scheduler.drain_outputs()):
            self.logprobs.setdefault(output.request.id, []).extend(output.logprobs)

    def run(self, steps: int) -> None:
        while self.scheduler.has_work and steps > 0:
            self.step()
            steps -= 1

    def end(self) -> None:
        """Run all there is to its end, which has to come."""
        self.run(STEPS_AT_MOST)
        assert not self.scheduler.has_work


class Talks:
    """Conversations that are continued and forked, and what cold ranks say in them."""

    def __init__(self, decoder: Decoder, rank: Rank) -> None:
        self.decoder, self.rank, self.rng = decoder, rank, rank.rng
        self.histories = [[7 + 5 * n + i % (5 + n) for i in range(self.rng.choice([20, 60, 100]))] for n in range(4)]
        self.open: dict[str, tuple[Request, int]] = {}
        self.asked = 0

    def ask(self) -> None:
        which, more, rng = self.rng.randrange(4), self.rng.randint(1, 12), self.rng
        history = self.histories[which]
        keep = history if rng.random() < 0.7 else history[: rng.randint(0, len(history))]
        sampling = Sampling(
            rng.randint(1, 14),
            ignore_eos=rng.random() < 0.7,
            logprobs=2 if rng.random() < 0.5 else None,
            temperature=rng.choice([0.0, 0.0, 1.0]),
            seed=rng.choice([1, 2]),
            presence_penalty=rng.choice([0.0, 0.0, 0.0, 0.5]),
            stop_token_ids=frozenset(rng.sample(range(3, 300), 40)) if rng.random() < 0.2 else frozenset(),
        )
        prompt = (*keep[:95], *(3 + (which + 7 * i) % 90 for i in range(more)))
        request = Request(str(self.asked), prompt, sampling)
        self.asked += 1
        self.open[request.id] = (request, which)
        if self.rank.drafter is not None:
            self.rank.answers[request.id] = self.cold(request)[0]
        self.rank.scheduler.add(request)

    def cold(self, asked: Request) -> tuple[list[int], list[TokenLogprob]]:
        rank = ParityRank(self.decoder, record=False)
        request, told = Request("cold", asked.prompt, asked.sampling), list[TokenLogprob]()
        rank.scheduler.add(request)
        while rank.scheduler.has_work:
            batch = rank.scheduler.schedule()
            for output in rank.scheduler.commit(batch, rank.runner.run(batch)):
                told += output.logprobs
        return request.output, told

    def compare(self) -> None:
        for name, (request, which) in list(self.open.items()):
            if request.finish is None:
                continue
            del self.open[name]
            answer, told = self.cold(request)
            mine = self.rank.logprobs.get(name, [])
            assert request.output == answer[: len(request.output)]
            assert mine == told[: len(mine)]
            if request.finish in (FinishReason.LENGTH, FinishReason.STOP):
                fills_pool = len(request.tokens) == self.rank.scheduler.context_tokens
                assert fills_pool or len(request.output) == len(answer)
                assert len(mine) == (len(request.output) if request.sampling.logprobs is not None else 0)
                self.histories[which] = list(request.tokens)
            self.rank.seen[request.finish.value] += 1


def drive_all(decoder: Decoder, folder: Path) -> Counter[str]:
    return sum((drive(decoder, seed, folder / str(seed)) for seed in range(SCHEDULES)), Counter())


def drive(decoder: Decoder, seed: int, folder: Path) -> Counter[str]:
    rng = random.Random(seed)
    rank = Rank(decoder, rng, folder)
    talks = Talks(decoder, rank)
    try:
        for _ in range(rng.randint(40, 80)):
            match rng.choice(["ask"] * 5 + ["abort", "steps", "steps", "finish", "settle"]):
                case "ask" if len(talks.open) < 5:
                    talks.ask()
                case "abort" if talks.open:
                    rank.scheduler.abort(rng.choice(list(talks.open)))
                case "steps":
                    rank.run(rng.randint(1, 12))
                case "finish":
                    rank.end()
                case "settle":
                    rank.settle()
            rank.take([])
            talks.compare()
        rank.end()
        talks.compare()
        rank.settle()
    finally:
        rank.close()
    stats = rank.scheduler.stats()
    counted = {"ahead": rank.ahead, "loaded": rank.moved.loaded_pages, "fetched": rank.moved.fetched_pages}
    counted |= {"preempted": stats.preemptions, "cached": stats.cached_tokens, "held": sum(stats.accepted_tokens)}
    return rank.seen + Counter(counted)


@pytest.mark.long
@pytest.mark.usefixtures("exact_arithmetic")
@pytest.mark.timeout(7200)
def test_answers_are_those_of_cold_ranks(decoder: Decoder, tmp_path: Path) -> None:
    """For full, window and recurrent models, and for every way of keeping windows; each kind of event has come up."""
    seen = drive_all(decoder, tmp_path)
    print(dict(seen))
    kinds = ("ahead", "loaded", "cached", "held", "preempted", "abort", "failed", "error", "length")
    assert all(seen[kind] > 0 for kind in kinds), seen


def freed_in_flight(patch: pytest.MonkeyPatch) -> None:
    """A page that is given up is free at once, whatever is launched."""
    patch.setattr(HeldBack, "give_up", lambda self, group, pages: self._pools[group].free(pages))


@pytest.mark.long
@pytest.mark.usefixtures("exact_arithmetic")
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("decoder", ["llama"], indirect=True)
@pytest.mark.parametrize("plant", [freed_in_flight])
def test_a_planted_bug_is_found(
    decoder: Decoder, plant: Callable[[pytest.MonkeyPatch], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of the schedules ends otherwise."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, IntegrityError)):
        drive_all(decoder, tmp_path)
