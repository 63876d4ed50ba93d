"""Adapters (LoRA) have the tokenizer of the model they are over: their prompts find the blocks that events tell of."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.core.types import Engine
from router.errors import ConfigError, NotFound
from router.fleet.worker import Worker
from router.fleet.worker_api import WorkerInfo
from router.settings import ModelSpec, WorkerSpec
from router.telemetry.logging import make_logger
from router.tokenizers import learn_from_worker, use_local
from router.wire.kv_events import BlockStored, EventBatch
from tests.fakes.brain_world import FILES, NEEDLE, World

LOG = make_logger(level="info", form="json", stream=io.StringIO())
TEXT = "key-0017 val-0093 " * 40


def world_of(*models: str, engine: Engine = Engine.VLLM) -> World:
    world = World(ranks=0, tokens=False)
    world.slots = [world.add("w", models=frozenset(models), engine=engine)]
    return world


async def reusable(world: World, model: str) -> int:
    """Tokens of the text that the rank is believed to hold."""
    return world.brain._knowledge.reusable(await world.prepare(TEXT, model=model)).get(world.slots[0], 0)


async def test_an_adapters_blocks_are_found_by_its_prompts_alone() -> None:
    """With its model's tokenizer named, and nothing else."""
    world = world_of("m", "ad")
    use_local(world.brain, [ModelSpec(name="m", tokenizer=NEEDLE, adapters=("ad",))], LOG)
    tokens = (await world.prepare(TEXT, model="ad")).tokens
    assert tokens is not None
    event = BlockStored((1, 2, 3), None, tokens[:48], 16, lora_name="ad")
    world.fleet.apply(world.slots[0], EventBatch(0.0, (event,)), now=world.now)
    assert (await reusable(world, "ad"), await reusable(world, "m")) == (48, 0)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_tokenizer_of_its_own_is_kept(is_first: bool, tmp_path: Path) -> None:
    """In whatever order they are written."""
    (tmp_path / "tokenizer.json").write_bytes(FILES[0])  # without a template, which the model has
    own, model = ModelSpec(name="ad", tokenizer=tmp_path), ModelSpec(name="m", tokenizer=NEEDLE, adapters=("ad", "b"))
    world = world_of("m", "ad", "b")
    use_local(world.brain, [own, model] if is_first else [model, own], LOG)
    chat = b'{"model": "m", "messages": [{"role": "user", "content": "key-0017"}]}'
    assert world.brain.token_ids("ad", chat) is None
    assert world.brain.token_ids("b", chat) == world.brain.token_ids("m", chat)


def worker(*cards: dict[str, Any], engine: Engine) -> Worker:
    names = tuple(card["id"] for card in cards)
    info = WorkerInfo(
        "w", "http://w", engine, names, None, 1, (None,), 16, None, None, cards={c["id"]: c for c in cards}
    )
    return Worker(WorkerSpec(url="http://w"), info=info)


CARDS = ({"id": "m", "parent": None}, {"id": "ad", "parent": "m"}, {"id": "odd", "parent": ["m"]}, {"id": "lost"})


@pytest.mark.parametrize(("engine", "is_apart"), [(Engine.VLLM, True), (Engine.SGLANG, False)])
async def test_a_worker_tells_whose_adapter_a_model_is(engine: Engine, is_apart: bool) -> None:
    """It has that model's tokenizer. By its name alone SGLang computes that model itself."""
    world = world_of("m", "ad", "odd", "lost", engine=engine)
    use_local(world.brain, [ModelSpec(name="m", tokenizer=NEEDLE)], LOG)
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(404))) as client:
        await learn_from_worker(worker(*CARDS, engine=engine), world.brain, client, LOG)
    assert [name for name in ("m", "ad", "odd", "lost") if world.brain.has_tokenizer(name)] == ["m", "ad"]
    assert (world.brain.seeds("ad", {}) != world.brain.seeds("m", {})) is is_apart


@pytest.mark.parametrize(
    "config",
    [
        {"chat_template": 5},
        {"chat_template": [1]},
        {"chat_template": [{"name": "default"}]},
        {"chat_template": "{{" + "(" * 100_000},
        {"chat_template": "{{ " + "-" * 100_000 + "1 }}"},
        {"chat_template": "{% if a %}" * 5000},
        {"chat_template": {"a": 1}},
        {"bos_token": {"content": [1]}},
    ],
)
async def test_an_odd_configuration_costs_the_tokenizer_alone(config: dict[str, Any]) -> None:
    """It is a ``ConfigError``, whatever is in it, or no harm."""
    answers = {
        "/tokenizer.json": httpx.Response(200, content=FILES[0]),
        "/tokenizer_info": httpx.Response(200, json=config),
    }
    world = world_of("m")
    transport = httpx.MockTransport(lambda request: answers[request.url.path])
    async with httpx.AsyncClient(transport=transport) as client:
        try:
            await learn_from_worker(worker(CARDS[0], engine=Engine.VLLM), world.brain, client, LOG)
        except ConfigError as error:
            refusal = str(error)
        else:
            refusal = ""
    assert world.brain.has_tokenizer("m") is not bool(refusal)
    assert len(refusal) < 1000


async def test_an_adapter_of_sglangs_is_asked_for_beside_its_model() -> None:
    """As ``model:adapter``, whatever colons and other names the model has, or in ``lora_path``; the former counts."""
    world = world_of("m", "s3://a/m", engine=Engine.SGLANG)
    models = [ModelSpec(name="m", tokenizer=NEEDLE, aliases=("alias",)), ModelSpec(name="s3://a/m", tokenizer=NEEDLE)]
    use_local(world.brain, models, LOG)
    brain = world.brain
    for name, told in {
        "m": ("m", "", "m"),
        "alias": ("m", "", "m"),
        "m:ad": ("m", "ad", "m:ad"),
        "m: ad ": ("m", "ad", "m: ad "),
        "m:a:d": ("m", "a:d", "m:a:d"),
        "m:": ("m", "", "m:"),
        "alias:ad": ("m", "ad", "m:ad"),
        "s3://a/m": ("s3://a/m", "", "s3://a/m"),
        "s3://a/m:ad": ("s3://a/m", "ad", "s3://a/m:ad"),
    }.items():
        assert brain.resolve(name) == told
    for name in ("n:ad", ":ad", "s3://a/m2:ad", ":" * 1_000_000):
        with pytest.raises(NotFound):
            brain.resolve(name)
    plain, own = brain.seeds("m", {"model": "m"}), brain.seeds("m", {"model": "m:ad"})
    assert own != plain
    assert brain.seeds("m", {"model": "alias:ad"}) == own
    assert brain.seeds("m", {"model": "m", "lora_path": "ad"}) == own
    assert brain.seeds("m", {"model": "m:ad", "lora_path": "other"}) == own
    assert brain.seeds("m", {"model": "m", "lora_path": ["ad"]}) == plain
    assert brain.seeds("m", {"model": "m:"}) == plain


async def test_an_adapters_blocks_are_found_on_sglang() -> None:
    """What asks for the adapter's name alone is computed by its model there, although workers list that name."""
    world = world_of("m", "ad", engine=Engine.SGLANG)
    use_local(world.brain, [ModelSpec(name="m", tokenizer=NEEDLE), ModelSpec(name="ad", tokenizer=NEEDLE)], LOG)
    prepared = await world.prepare(TEXT, model="m:ad")
    assert prepared.tokens is not None
    assert (prepared.model, prepared.told_model) == ("m", "m:ad")
    event = BlockStored((1, 2, 3), None, prepared.tokens[:48], 16, lora_name="ad")
    world.fleet.apply(world.slots[0], EventBatch(0.0, (event,)), now=world.now)
    assert [await reusable(world, model) for model in ("m:ad", "m", "ad", "m:other")] == [48, 0, 0, 0]


@pytest.mark.parametrize("engine", [Engine.VLLM, Engine.SHIM])
async def test_other_engines_know_no_adapter_behind_a_colon(engine: Engine) -> None:
    """Nor ``lora_path``; where another engine serves the model as well, neither counts."""
    for engines in ((engine,), (Engine.SGLANG, engine)):
        world = World(ranks=0, tokens=False)
        world.slots = [world.add(f"w{number}", engine=each) for number, each in enumerate(engines)]
        with pytest.raises(NotFound):
            world.brain.resolve("m:ad")
        assert world.brain.seeds("m", {"model": "m", "lora_path": "ad"}) == world.brain.seeds("m", {"model": "m"})
