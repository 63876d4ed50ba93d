"""Loads that are held up: a step starts meanwhile and waits at the layer it needs; a lost page is computed again."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from offload_rank import OffloadRank
from parity_rank import ParityRank
from tiny_models import make_tiny_model

from engine_shim.attention.paged import Pools
from engine_shim.attention.recurrent import States
from engine_shim.cache.transfers import LoadError
from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.tokenizer import read_card
from engine_shim.offload.barrier import LayerBarrier
from engine_shim.offload.host import HostPool

PROMPTS = [[5 + (n + 3) * i % 90 for i in range(90)] for n in range(3)]


@pytest.fixture(scope="module", params=["gemma3", "qwen3_next"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    tiny = make_tiny_model(request.param, tmp_path_factory.mktemp(request.param))
    return load_decoder(read_card(str(tiny.folder)), dtype=torch.float64)


@pytest.fixture(params=[4.0])
def rank(request: pytest.FixtureRequest, decoder: Decoder, tmp_path: Path) -> Iterator[OffloadRank]:
    """Room for one prompt on the device; the host has all three, or with a ratio of 1.2 one, and the disk all."""
    rank = OffloadRank(
        decoder,
        pool_tokens=112,
        window_pool_tokens=112,
        state_slots=8,
        host_ratio=request.param,
        disk_ratio=6.0,
        folder=tmp_path,
    )
    for n, prompt in enumerate(PROMPTS):
        rank.generate({f"first {n}": prompt}, max_tokens=2)
        rank.settle()
    yield rank
    rank.close()


class Gate:
    """Lets the layers of loads pass one at a time."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.passes = threading.Semaphore(0)
        advance = LayerBarrier.advance

        def held(barrier: LayerBarrier, load: int, **then: object) -> None:
            advance(barrier, load, **then)
            assert self.passes.acquire(timeout=100)

        patch.setattr(LayerBarrier, "advance", held)


def test_a_step_waits_layer_by_layer(rank: OffloadRank, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """While a load stands at a layer, the forward pass has come as far as that and no further; then it is exact."""
    gate = Gate(monkeypatch)
    seen: list[int] = []
    wait = LayerBarrier.wait

    def noted(barrier: LayerBarrier, layer: int) -> None:
        wait(barrier, layer)
        seen.append(layer)

    monkeypatch.setattr(LayerBarrier, "wait", noted)
    work = threading.Thread(target=rank.generate, args=({"again": PROMPTS[0]},), kwargs={"max_tokens": 1})
    work.start()
    layers = len(decoder.config.layers)
    for layer in range(layers):
        assert len(seen) <= layer + 1
        gate.passes.release()
        while len(seen) <= layer and work.is_alive():
            time.sleep(0.002)
    gate.passes.release(1000)
    work.join(100)
    assert seen[:layers] == list(range(layers))
    rank.settle()
    cold = ParityRank(decoder)
    cold.generate({"cold": PROMPTS[0]}, max_tokens=1)
    position = max(rank.logits["again"])
    torch.testing.assert_close(rank.logits["again"][position], cold.logits["cold"][position], atol=1e-9, rtol=1e-9)
    assert rank.moved.loaded_pages > 0


def test_an_accessor_without_the_barrier(rank: OffloadRank, decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the first layer's buffers, keys and values or states, are read past the barrier, and it shows."""
    accessor = Pools if decoder.config.delta_net is None else States
    started = threading.Event()
    holds = HostPool.holds

    def late(host: HostPool, *what: object) -> bool:
        """A load asks this first."""
        return started.wait(100) and holds(host, *what)

    monkeypatch.setattr(HostPool, "holds", late)
    of_layer = accessor.of_layer

    def past(pool: Pools | States, *place: int) -> tuple[torch.Tensor, ...]:
        """What stands there before the load has begun; later layers, and other accessors, still wait."""
        if started.is_set():
            return of_layer(pool, *place)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LayerBarrier, "wait", lambda barrier, layer: None)
            early = tuple(tensor.clone() for tensor in of_layer(pool, *place))
        started.set()
        return early

    monkeypatch.setattr(accessor, "of_layer", past)
    rank.generate({"again": PROMPTS[0]}, max_tokens=1)
    rank.settle()
    cold = ParityRank(decoder)
    cold.generate({"cold": PROMPTS[0]}, max_tokens=1)
    position = max(rank.logits["again"])
    assert not torch.allclose(rank.logits["again"][position], cold.logits["cold"][position])


@pytest.mark.parametrize(
    ("rank", "damage"),
    [(1.2, "flipped"), (1.2, "cut"), (4.0, "host")],
    indirect=["rank"],
    ids=["flipped", "cut", "host"],
)
def test_a_damaged_copy_is_computed(rank: OffloadRank, decoder: Decoder, tmp_path: Path, damage: str) -> None:
    """Whatever happened to the disk's files or the host's slots, the answer is right and the loss is counted."""
    if damage == "flipped":
        for path in tmp_path.glob("*.page"):
            contents = bytearray(path.read_bytes())
            contents[len(contents) // 2] ^= 4
            path.write_bytes(contents)
    elif damage == "cut":
        for path in tmp_path.glob("*.page"):
            os.truncate(path, path.stat().st_size - 1)
    else:
        for names in rank.host.names:
            names[:] = type(names)("Q", [1] * len(names))
    cold = ParityRank(decoder)
    for n, prompt in enumerate(PROMPTS):
        rank.generate({f"again {n}": prompt}, max_tokens=4)
        rank.settle()
        cold.generate({f"cold {n}": prompt}, max_tokens=4)
        position = max(rank.logits[f"again {n}"])
        pair = (rank.logits[f"again {n}"][position], cold.logits[f"cold {n}"][position])
        torch.testing.assert_close(*pair, atol=1e-9, rtol=1e-9)
    assert rank.moved.failed_transfers > 0


def test_a_load_that_fails_fails_the_wait() -> None:
    """Whoever waits for a layer of a failed load is told; one that is not expected is nobody's matter."""
    barrier = LayerBarrier()
    barrier.begin(1)
    barrier.begin(2)
    barrier.advance(1)
    barrier.expect([1])
    barrier.wait(0)
    barrier.fail(2)
    barrier.wait(0)
    barrier.fail(1)
    with pytest.raises(LoadError):
        barrier.wait(1)
    barrier.forget(1)
    barrier.wait(1)
