"""What one process leaves on disk the next one loads, if it is the same model; and it is what was computed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import offload_rank
import pytest
import torch
from offload_rank import OffloadRank
from parity_rank import ParityRank
from tiny_models import FAMILIES, make_tiny_model

from engine_shim.cache.transfers import Place
from engine_shim.model import linear
from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.tokenizer import read_card
from engine_shim.offload.disk import FINGERPRINT_BYTES
from engine_shim.offload.identity import fingerprint
from engine_shim.types import GroupKind
from router.wire.kv_events import BlockStored, Event

PROMPTS = [[5 + (n + 3) * i % 90 for i in range(90)] for n in range(3)]


def decoder_of(family: str, folder: Path, *, seed: int = 0) -> Decoder:
    return load_decoder(read_card(str(make_tiny_model(family, folder, seed=seed).folder)), dtype=torch.float64)


@pytest.fixture(scope="module", params=["llama", "gemma3", "qwen3_next"])
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def decoder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    return decoder_of(family, tmp_path_factory.mktemp(family))


def start(decoder: Decoder, folder: Path, **options: object) -> OffloadRank:
    """Room for one prompt on the device and a little more on the host."""
    sizes = {"pool_tokens": 112, "window_pool_tokens": 112, "state_slots": 8, "host_ratio": 1.2, "disk_ratio": 6.0}
    return OffloadRank(decoder, folder=folder, **{**sizes, **options})


def asked(rank: OffloadRank, name: str) -> None:
    for n, prompt in enumerate(PROMPTS):
        rank.generate({f"{name} {n}": prompt}, max_tokens=3)
        rank.settle()


def agrees(rank: OffloadRank, decoder: Decoder, name: str) -> None:
    """Each answer is that of a rank which computes it alone."""
    cold = ParityRank(decoder)
    for n, prompt in enumerate(PROMPTS):
        cold.generate({f"{name} {n}": prompt}, max_tokens=3)
        position = max(rank.logits[f"{name} {n}"])
        pair = (rank.logits[f"{name} {n}"][position], cold.logits[f"{name} {n}"][position])
        torch.testing.assert_close(*pair, atol=1e-6, rtol=1e-6)


def on_disk(events: Iterable[Event]) -> set[tuple[int, int | bytes]]:
    """(group, hash) of what is told to be on disk."""
    stored = [event for event in events if isinstance(event, BlockStored) and event.medium == Place.DISK]
    return {(event.group, name) for event in stored for name in event.hashes}


def test_the_next_process_loads_what_this_one_left(decoder: Decoder, tmp_path: Path) -> None:
    """It tells at its start what is there, computes a page of each prompt at most, and answers as before."""
    first = start(decoder, tmp_path)
    asked(first, "first")
    left = on_disk(first.scheduler.snapshot_events())
    first.close()
    second = start(decoder, tmp_path)
    assert on_disk(second.scheduler.take_events()) == left
    told = {group.index for group in second.layout.groups if group.kind is not GroupKind.DRAFT}
    assert {group for group, _ in left} == told
    asked(second, "again")
    agrees(second, decoder, "again")
    second.close()
    stats = second.scheduler.stats()
    assert stats.loaded_tokens >= sum(map(len, PROMPTS)) - 2 * len(PROMPTS) * second.layout.page_tokens
    assert second.moved.fetched_pages > 0
    assert second.moved.failed_transfers == 0
    assert second.moved.refused_pages == {}


def test_without_the_fingerprint_answers_would_be_another_models(
    decoder: Decoder, family: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: object
) -> None:
    """Planted: a fingerprint that tells nothing apart. Whatever loads then is wrong, so the tests here have power."""
    monkeypatch.setattr(offload_rank, "fingerprint", lambda decoder, layout, contents: bytes(FINGERPRINT_BYTES))
    first = start(decoder, tmp_path)
    asked(first, "first")
    first.close()
    other = decoder_of(family, tmp_path_factory.mktemp("other"), seed=1)
    second = start(other, tmp_path)
    asked(second, "again")
    second.close()
    with pytest.raises(AssertionError, match="not close"):
        agrees(second, other, "again")


@pytest.mark.parametrize("change", ["weights", "page", "dtype"])
def test_another_model_uses_nothing_of_it(
    decoder: Decoder, family: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, change: str
) -> None:
    """Other weights of the same shape, other pages, other numbers: all is refused and counted, answers are its own."""
    first = start(decoder, tmp_path)
    asked(first, "first")
    first.close()
    other, options = decoder, {}
    if change == "weights":
        other = decoder_of(family, tmp_path_factory.mktemp("other"), seed=1)
    elif change == "page":
        options = {"page_tokens": 16}
    else:
        folder = tmp_path_factory.mktemp("same")
        other = load_decoder(read_card(str(make_tiny_model(family, folder).folder)), dtype=torch.float32)
    files = len(list(tmp_path.glob("*.page")))
    second = start(other, tmp_path, **options)
    assert second.moved.refused_pages == {"foreign": files}
    assert on_disk(second.scheduler.take_events()) == set()
    if change == "weights":
        asked(second, "again")
        agrees(second, other, "again")
    second.close()


@pytest.mark.parametrize("every_family", sorted(FAMILIES))
def test_blocked_matrices_are_the_same_model(
    every_family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose matrices oneDNN has laid out takes the pages of one whose are plain, not those of other weights."""
    prints = {}
    for name, elements, seed in (("plain", 1 << 60, 0), ("blocked", 1, 0), ("other", 1, 1)):
        monkeypatch.setattr(linear, "_LARGE", elements)
        model = make_tiny_model(every_family, tmp_path / name, seed=seed)
        decoder = load_decoder(read_card(str(model.folder)), dtype=torch.float32)
        first = decoder.weights.layers[0]
        assert first.qkv.is_mkldnn == first.output.is_mkldnn == decoder.weights.head.is_mkldnn == (name != "plain")
        prints[name] = fingerprint(decoder, ParityRank(decoder).layout, contents="the same")
    assert prints["plain"] == prints["blocked"] != prints["other"]


def test_pages_that_spoilt_meanwhile_are_computed(decoder: Decoder, tmp_path: Path) -> None:
    """A byte of each page's contents has changed, which nobody can tell before it is read."""
    first = start(decoder, tmp_path)
    asked(first, "first")
    first.close()
    for path in tmp_path.glob("*.page"):
        contents = bytearray(path.read_bytes())
        contents[-5] ^= 1
        path.write_bytes(contents)
    second = start(decoder, tmp_path)
    assert second.moved.refused_pages == {}
    asked(second, "again")
    agrees(second, decoder, "again")
    second.close()
    assert second.moved.failed_transfers > 0


def test_a_reset_holds_for_the_next_process_too(decoder: Decoder, tmp_path: Path) -> None:
    first = start(decoder, tmp_path)
    asked(first, "first")
    assert first.scheduler.reset_cache()
    first.close()
    assert list(tmp_path.glob("*.page")) == []
