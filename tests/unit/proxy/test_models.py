"""What clients are told of models, and of there being none."""

from __future__ import annotations

import json
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from router.core.types import Engine, RankId
from router.errors import NotFound, NoWorker
from router.fleet.fleet import Fleet
from router.fleet.target import Target
from router.proxy.models import Census, Models
from router.settings import RoutingSettings
from router.telemetry.metrics import Metrics

#: As vLLM 0.11 describes a model and an adapter over it.
CARD = {
    "id": "m",
    "object": "model",
    "created": 1764000000,
    "owned_by": "vllm",
    "root": "/models/m",
    "parent": None,
    "max_model_len": 8192,
}
ADAPTER = {**CARD, "id": "lora", "root": "/models/lora", "parent": "m", "max_model_len": None}


class World:
    """A fleet to which workers are added, and the models over it."""

    def __init__(self) -> None:
        self.fleet = Fleet(RoutingSettings(), Metrics(CollectorRegistry()), clock=lambda: 0.0)
        self.models = Models(self.fleet)

    def add(self, worker: str, *cards: dict[str, Any], model: str = "m") -> None:
        self.fleet.add_rank(
            RankId(worker, 0),
            target=Target("127.0.0.1", 1, 0, 1, Engine.VLLM),
            models=frozenset({model, *(card["id"] for card in cards)}),
            block_tokens=16,
            pool_tokens=None,
            cards={card["id"]: card for card in cards},
        )

    def listed(self) -> list[dict[str, Any]]:
        """The cards that ``GET /v1/models`` answers with; each is also what is told of it alone."""
        cards = json.loads(self.models.model_list())["data"]
        assert cards == [json.loads(self.models.model_card(card["id"])) for card in cards]
        return list(cards)


def test_a_workers_card_goes_to_the_client_as_it_is() -> None:
    """Context, path, parent, owner and time: nothing is left out or made up."""
    world = World()
    world.add("a", CARD, ADAPTER)
    assert world.listed() == [ADAPTER, CARD]


def test_the_first_worker_speaks_but_the_shortest_context_holds() -> None:
    """A prompt that fits one worker only may be sent to the other."""
    world = World()
    world.add("a", CARD)
    world.add("b", {**CARD, "owned_by": "sglang", "created": 1, "max_model_len": 4096})
    world.add("c", {**CARD, "max_model_len": None})
    assert world.listed() == [{**CARD, "max_model_len": 4096}]


@pytest.mark.parametrize(
    ("contexts", "most_tokens"),
    [
        ((4096, 8192), 8192),
        ((4096, None), 1024 * 1024),
        ((None,), 1024 * 1024),
        ((None, 10_000_000), 10_000_000),
    ],
)
def test_what_a_prompt_may_have(contexts: tuple[int | None, ...], most_tokens: int) -> None:
    """The longest context, and a million tokens where a rank does not say: what is longer is not followed."""
    world = World()
    for number, tokens in enumerate(contexts):
        world.add(f"w{number}", {**CARD, "max_model_len": tokens})
    assert world.models.most_tokens("m") == most_tokens


def test_an_alias_has_the_card_of_its_model() -> None:
    """Under its own name."""
    world = World()
    world.models.set_alias("short", "m")
    world.add("a", CARD)
    assert world.listed() == [CARD, {**CARD, "id": "short"}]


def test_a_model_that_no_worker_describes_has_a_plain_card() -> None:
    """Named by the operator, or by an engine that says no more than the name."""
    world = World()
    world.add("a")
    assert world.listed() == [{"id": "m", "object": "model", "created": 0, "owned_by": "homing"}]


@pytest.mark.parametrize(
    ("census", "sentence"),
    [
        (Census(0, 0), "No worker is registered yet."),
        (Census(1, 0), "No worker is up yet: 1 is being asked."),
        (Census(3, 0), "No worker is up yet: 3 are being asked."),
        (Census(1, 1), "No worker is up: the only one is down."),
        (Census(3, 3), "No worker is up: all 3 are down."),
        (Census(3, 1), "No worker is up: of 3, 1 is down."),
        (Census(3, 2), "No worker is up: of 3, 2 are down."),
    ],
)
def test_while_no_worker_has_been_up_clients_are_told_how_many_there_are(census: Census, sentence: str) -> None:
    """Registered and down is another thing than not registered."""
    world = World()
    world.models.count_workers(lambda: census)
    with pytest.raises(NoWorker) as caught:
        world.models.resolve("m")
    assert caught.value.message == sentence
    world.add("a")
    assert world.models.resolve("m") == ("m", "", "m")
    with pytest.raises(NotFound):
        world.models.resolve("other")


def test_of_an_absurd_name_an_error_says_the_beginning() -> None:
    """A megabyte of it is not sent back."""
    world = World()
    world.add("a")
    with pytest.raises(NotFound) as caught:
        world.models.resolve("x" * 1_000_000)
    assert len(caught.value.message) < 400
