"""A router's brain over a real fleet, with a clock in hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from router.core.types import Engine, RankId, RankStatus
from router.fleet.fleet import Fleet
from router.fleet.target import Target
from router.proxy.brain import RouterBrain
from router.proxy.prepared import PreparedRequest
from router.proxy.tokenization import PromptTokenizer
from router.proxy.types import Attempt, Outcome
from router.settings import RoutingSettings
from router.telemetry.metrics import Metrics
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockStored, EventBatch
from router.wire.openai import Endpoint, parse_request

NEEDLE = Path(__file__).parents[2] / "engine_shim" / "model" / "needle"
FILES = (NEEDLE / "tokenizer.json").read_bytes(), json.loads((NEEDLE / "tokenizer_config.json").read_bytes())
BLOCK = 16
TOKENIZER = PromptTokenizer.from_files(*FILES)
#: Ends after which what was computed of the prompt is in the rank's cache.
ENDS_WITH_CONTEXT = (Outcome.OK, Outcome.CLIENT_GONE, Outcome.DEADLINE, Outcome.SHUTDOWN)
FAILURES = [o for o in Outcome if o not in ENDS_WITH_CONTEXT]


class World:
    """A fleet of ready ranks that serve ``m``, a brain, and a clock that stands still until moved."""

    def __init__(self, *, ranks: int = 2, tokens: bool = True, **settings: Any) -> None:
        self.now = 1000.0
        self.metrics = Metrics(CollectorRegistry())
        routing = RoutingSettings(**settings)
        self.fleet = Fleet(routing, self.metrics, clock=lambda: self.now)
        self.brain = RouterBrain(self.fleet, settings=routing, metrics=self.metrics)
        if tokens:
            self.brain.set_tokenizer("m", TOKENIZER)
        self.slots = [self.add(f"w{number}") for number in range(ranks)]

    def add(
        self,
        worker: str,
        *,
        models: frozenset[str] = frozenset({"m"}),
        engine: Engine = Engine.SHIM,
        prefill_chunk_tokens: int | None = None,
        cards: dict[str, dict[str, object]] | None = None,
    ) -> int:
        slot = self.fleet.add_rank(
            RankId(worker, 0),
            target=Target("127.0.0.1", 1, 0, 1, engine),
            models=models,
            block_tokens=BLOCK,
            pool_tokens=100_000,
            prefill_chunk_tokens=prefill_chunk_tokens,
            cards=cards or {},
        )
        self.fleet.set_status(slot, RankStatus.READY)
        return slot

    async def prepare(
        self, prompt: Sequence[int] | str | list[dict[str, Any]], headers: dict[str, str] | None = None, **fields: Any
    ) -> PreparedRequest:
        """A request for token ids, text, or messages."""
        is_chat = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)
        endpoint, name = (Endpoint.CHAT, "messages") if is_chat else (Endpoint.COMPLETIONS, "prompt")
        body = json.dumps({"model": "m", name: prompt, **fields}).encode()
        return await self.brain.prepare(parse_request(endpoint, body), headers or {}, tenant="t")

    async def ask(
        self, prompt: Sequence[int] | str | list[dict[str, Any]], session: str | None = None, **fields: Any
    ) -> Attempt:
        """Prepare and choose."""
        headers = {"x-session-id": session} if session else {}
        return self.brain.choose(await self.prepare(prompt, headers, **fields))

    async def promised(self, prompt: Sequence[int]) -> dict[int, int]:
        """What each rank is believed to hold of a prompt, without asking for it."""
        return dict(self.brain._knowledge.reusable(await self.prepare(prompt)))

    def publish(self, slot: int, tokens: Sequence[int], *, medium: str = "GPU") -> None:
        """The rank's events say that it holds these tokens' whole blocks."""
        keys = block_keys(tokens, block_tokens=BLOCK, parent=namespace_seed("", ""))
        if keys:
            event = BlockStored(tuple(keys), None, tuple(tokens[: len(keys) * BLOCK]), BLOCK, medium)
            self.fleet.apply(slot, EventBatch(self.now, (event,)), now=self.now)

    def sample(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(f"homing_{name}", labels)
        return 0.0 if value is None else value

    def rank_sample(self, name: str, slot: int) -> float:
        return self.sample(name, worker=f"w{slot}", rank="0")


def prompt_of(length: int, *, start: int = 100) -> list[int]:
    """Token ids that no other start has."""
    return list(range(start, start + length))
