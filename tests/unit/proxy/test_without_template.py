"""A tokenizer without a chat template, or none at all: chats are keyed by their text, and the operator is told."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from router.proxy.tokenization import PromptTokenizer
from router.settings import ModelSpec
from router.telemetry.logging import make_logger
from router.tokenizers import use_local
from tests.fakes.brain_world import FILES, World

LONG = [{"role": "user", "content": "the same words again and again " * 20}]
SHORT = [{"role": "user", "content": "hello"}]


def keyed(world: World) -> dict[str, float]:
    """Prompts so far, by how they were keyed."""
    (family,) = world.metrics.prompts.collect()
    return {each.labels["keyed"]: each.value for each in family.samples if each.name.endswith("_total")}


@pytest.mark.parametrize("has_tokenizer", [False, True])
async def test_chats_are_keyed_by_text(has_tokenizer: bool) -> None:
    """Also those that are shorter than a block of text."""
    world = World(tokens=False)
    if has_tokenizer:
        world.brain.set_tokenizer("m", PromptTokenizer.from_files(FILES[0], {}))
    first = await world.ask(LONG)
    again = await world.prepare(LONG)
    await world.prepare(SHORT)
    assert keyed(world) == {"text": 3.0}
    assert world.brain._knowledge.reusable(again)[first.decision.slot] > 0


async def test_plain_prompts_are_keyed_by_tokens() -> None:
    """For them no template is needed."""
    world = World(tokens=False)
    world.brain.set_tokenizer("m", PromptTokenizer.from_files(FILES[0], {}))
    await world.prepare("key-0001 val-0001")
    assert keyed(world) == {"tokens": 1.0}


@pytest.mark.parametrize("template", [None, "{% for message in messages %}{{ message.content }}{% endfor %}"])
def test_the_operator_is_told(template: str | None, tmp_path: Path) -> None:
    """Once, at the start, by the model's name; and nothing where there is a template."""
    (tmp_path / "tokenizer.json").write_bytes(FILES[0])
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    stream = io.StringIO()
    world = World(tokens=False)
    use_local(
        world.brain, [ModelSpec(name="m", tokenizer=tmp_path)], make_logger(level="info", form="json", stream=stream)
    )
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    if template is not None:
        assert lines == []
        return
    (line,) = lines
    assert (line["level"], line["models"]) == ("warning", ["m"])
    assert "no chat template: chats are keyed by their text" in line["event"]
