"""What a prompt may cost: by the longest that a rank takes, not by its size, and never at a shorter one's expense."""

from __future__ import annotations

import asyncio
import json
import threading
from array import array
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
from chats import chat, turns
from tokenizers import Tokenizer

from engine_shim.model.tokenizer import read_card
from router.core.session import conversation_head
from router.proxy import models
from router.proxy.encoder import Encode, encoder_of
from router.proxy.lanes import Lanes
from router.proxy.prepared import request_text_keys
from router.proxy.tokenization import SLICE_CHARS, USUAL_CHARS, Draft, PromptTokenizer, TooLong
from router.proxy.weight import is_light, is_quickly_read
from router.wire.block_keys import namespace_seed
from router.wire.chat_template import ChatTemplate
from router.wire.openai import Endpoint, parse_request
from tests.fakes.brain_world import World

TEMPLATE = ChatTemplate("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}", variables={})
CONTEXT = 1000


@cache
def model(name: str) -> tuple[Tokenizer, Encode]:
    tokenizer = read_card(name).tokenizer
    return tokenizer, encoder_of(tokenizer)


class Gated:
    """An encoder that counts, and that waits at a gate for texts with ``mark`` in them."""

    def __init__(self, name: str, *, mark: str | None = None) -> None:
        tokenizer, self._encode = model(name)
        self._mark = mark
        self.chars = 0
        self.waiting = threading.Semaphore(0)
        self.gate = threading.Semaphore(0)
        self.tokenizer = PromptTokenizer(tokenizer, TEMPLATE, encode=self)
        self.chars = 0

    def __call__(self, text: str) -> array[int]:
        if self._mark is not None and self._mark in text:
            self.waiting.release()
            assert self.gate.acquire(timeout=60)
        self.chars += len(text)
        return self._encode(text)


def world_of(gated: Gated, *, context: int | None = CONTEXT) -> World:
    world = World(ranks=0)
    world.brain.set_tokenizer("m", gated.tokenizer)
    world.add("w0", cards={} if context is None else {"m": {"id": "m", "max_model_len": context}})
    return world


def lines(count: int, mark: str = "") -> str:
    return "".join(f"line {number}{mark}\n" for number in range(count))


# --- what fits nobody ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["needle", "smollm2"])
@pytest.mark.parametrize("text", [lines(200_000), "x" * 2_000_000, " " * 2_000_000, "中文" * 1_000_000])
async def test_what_fits_nobody_costs_what_fits(name: str, text: str) -> None:
    """Two megabytes for a context of 1,000 tokens: a slice of it is tokenized, and it goes by load alone; whether it
    has places to cut it or none.
    """
    gated = Gated(name)
    world = world_of(gated)
    asked = await world.prepare([{"role": "user", "content": text}], {"x-session-id": "s"})

    assert gated.chars <= SLICE_CHARS
    assert (asked.tokens, asked.session, asked.prompt_tokens, asked.text_keys) == (None, None, 1, None)


def test_a_prompt_a_little_too_long_is_left_where_it_gets_so() -> None:
    """At the piece that is one too many, although its size says nothing."""
    gated = Gated("smollm2")
    text = lines(3000)
    tokens = len(gated._encode(text))
    draft = gated.tokenizer.start(chat(turns(text)), most_tokens=tokens // 2)
    assert draft is not None
    gated.chars = 0
    with pytest.raises(TooLong):
        draft.finish()
    assert gated.chars < 0.6 * len(text)


def test_a_text_of_long_tokens_that_fits_is_followed() -> None:
    """Twenty blanks a token are counted first and then tokenized as any other text: to the last token that may be."""
    gated = Gated("smollm2")
    text = " " * 400_000 + "\nend"
    expected = array("I", [*gated._encode("<|im_start|>"), *gated._encode(text)])
    request, most_tokens = chat([{"role": "user", "content": text}]), len(text) // 20
    assert len(text) > USUAL_CHARS * most_tokens

    draft = gated.tokenizer.start(request, most_tokens=most_tokens)
    assert draft is not None
    assert draft.finish().tokens == expected
    again = gated.tokenizer.start(request, most_tokens=len(expected) - 1)
    assert again is not None
    with pytest.raises(TooLong):
        again.finish()


@pytest.mark.parametrize("prompt", [list(range(5000)), [list(range(5000))]])
async def test_ids_are_counted_before_anything_else(prompt: list[Any]) -> None:
    """As messages are: none has less than one token."""
    world = world_of(Gated("needle"))
    assert (await world.prepare(prompt)).prompt_tokens == 1

    rendered: list[object] = []
    world.brain.set_tokenizer("m", PromptTokenizer(model("needle")[0], _spied(rendered.append)))
    assert (await world.prepare([{"role": "user", "content": ""}] * (CONTEXT + 1))).prompt_tokens == 1
    assert rendered == []
    await world.prepare([{"role": "user", "content": ""}])
    assert rendered


def _spied(see: Callable[[object], object]) -> ChatTemplate:
    """A template that tells of each rendering."""

    class Spied(ChatTemplate):
        def render(self, *args: Any, **options: Any) -> str:
            see(threading.current_thread())
            return super().render(*args, **options)

    return Spied("{{ messages[0].content }}", variables={})


# --- who has left, and who comes after ----------------------------------------------------------------


async def test_a_prompt_given_up_is_left_at_its_slice() -> None:
    """One of thirty slices has begun when the client leaves: it is the last. What waits for its turn never begins."""
    gated = Gated("smollm2", mark="slow")
    world = world_of(gated, context=None)
    world.brain._lanes = Lanes(cores=2)
    text = lines(200_000, "slow")
    asked = [
        asyncio.ensure_future(world.prepare([{"role": "user", "content": f"{name} {text}"}])) for name in ("a", "b")
    ]
    await asyncio.to_thread(gated.waiting.acquire)
    gated.chars = 0
    for one in asked:
        one.cancel()
    await asyncio.gather(*asked, return_exceptions=True)
    for _ in range(10_000):
        gated.gate.release()
    await world.brain._lanes.run(lambda: None, is_long=True)

    assert 0 < gated.chars <= 2 * SLICE_CHARS
    assert len(text) > 30 * SLICE_CHARS


async def test_short_prompts_never_wait_behind_long_ones() -> None:
    """Thirty prompts of a megabyte are under way, none of which goes on: a short one is answered all the same."""
    gated = Gated("smollm2", mark="slow")
    world = world_of(gated, context=None)
    text = lines(60_000, "slow")
    asked = [
        asyncio.ensure_future(world.prepare([{"role": "user", "content": f"{number} {text}"}])) for number in range(30)
    ]
    await asyncio.to_thread(gated.waiting.acquire)

    short = await asyncio.wait_for(world.prepare([{"role": "user", "content": lines(5_000)}]), 60)
    assert short.tokens is not None
    assert not any(one.done() for one in asked)
    for one in asked:
        one.cancel()
    for _ in range(100_000):
        gated.gate.release()
    await asyncio.gather(*asked, return_exceptions=True)


async def test_long_prompts_take_turns() -> None:
    """One of six slices comes after one of thirteen, on the only thread there is: it is through before that is."""
    gated = Gated("smollm2")
    world = world_of(gated, context=None)
    world.brain._lanes = Lanes(cores=1)
    ends: list[str] = []

    async def ask(name: str, text: str) -> None:
        await world.prepare([{"role": "user", "content": text}])
        ends.append(name)

    await asyncio.gather(ask("long", lines(70_000, "l")), ask("longish", lines(30_000, "m")))
    assert ends == ["longish", "long"]


# --- the loop's time ----------------------------------------------------------------------------------

SHAPES: dict[str, dict[str, Any]] = {
    "messages": {"messages": [{}] * 100_000},
    "parts": {"messages": [{"role": "user", "content": ["a"] * 100_000}]},
    "calls": {"messages": [{"role": "assistant", "tool_calls": [{}] * 100_000}]},
    "tools": {"messages": turns("x"), "tools": [1] * 100_000},
    "schema": {"messages": turns("x"), "tools": [{"p": {str(n): {} for n in range(40_000)}}]},
    "arguments": {"messages": turns("x"), "chat_template_kwargs": {"a": [[[]] * 40_000]}},
    "deep": {"messages": turns("x"), "documents": [[[[[[[[[[]]]]]]]]]] * 5_000},
    "bytes": {"messages": turns("x" * 2_000_000)},
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [True, False])
async def test_what_takes_long_is_not_done_on_the_loop(
    shape: str, tokens: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rendering and keying of bodies with many values, wherever they stand."""
    threads: list[object] = []

    def keys(*args: Any, **options: Any) -> Any:
        threads.append(threading.current_thread())
        return request_text_keys(*args, **options)

    monkeypatch.setattr(models, "request_text_keys", keys)
    world = World(tokens=False)
    if tokens:
        world.brain.set_tokenizer("m", PromptTokenizer(model("needle")[0], _spied(threads.append)))
    fields = SHAPES[shape]
    await world.prepare(fields["messages"], **{name: fields[name] for name in fields if name != "messages"})

    assert threads
    assert threading.current_thread() not in threads


async def test_an_agents_turn_stays_on_the_loop() -> None:
    """Four hundred messages, tools with their schemas, half a megabyte: no thread is asked."""
    schema = {"type": "object", "properties": {name: {"type": "string"} for name in "abcdefgh"}, "required": ["a"]}
    tools = [
        {"type": "function", "function": {"name": f"f{n}", "description": "", "parameters": schema}} for n in range(40)
    ]
    request = chat(turns(*("word " * 250 for _ in range(400))), tools=tools)
    assert len(request.body) > 400_000
    assert is_light(request)


def test_what_is_translated_is_counted_before_it_is_read() -> None:
    """Each object of an Anthropic or Responses body is made into something; of a chat it is not."""
    items = b'{"messages": [' + b",".join([b"{}"] * 100_000) + b"]}"
    for endpoint in (Endpoint.MESSAGES, Endpoint.RESPONSES):
        assert not is_quickly_read(endpoint, items)
        assert is_quickly_read(endpoint, b"x" * 1_000_000)
        assert not is_quickly_read(endpoint, b"x" * 1_100_000)
    assert is_quickly_read(Endpoint.CHAT, items)


class Counted(list[Any]):
    """A list that counts what is taken from it."""

    taken = 0

    def __iter__(self) -> Iterator[Any]:
        for item in super().__iter__():
            Counted.taken += 1
            yield item


@pytest.mark.parametrize(
    "messages",
    [
        lambda: Counted([{}] * 100_000),
        lambda: [{"role": "user", "content": Counted(["a"] * 100_000)}],
        lambda: [{"role": "system", "content": Counted([{"text": "a"}] * 100_000)}, {"role": "user"}],
    ],
)
def test_a_conversation_is_named_by_its_head(messages: Callable[[], list[Any]]) -> None:
    """However many messages and parts there are."""
    Counted.taken = 0
    conversation_head({"messages": messages()})
    assert 0 < Counted.taken < 100


def test_long_salts_are_not_remembered() -> None:
    """A thousand of sixty megabytes would fill the memory; their seeds are what they are."""
    one, two = namespace_seed("", "x" * 100_000), namespace_seed("", "x" * 99_999 + "y")
    assert one != two
    assert one == namespace_seed("", "x" * 100_000)


def test_what_had_to_be_counted_is_sliced_as_well() -> None:
    """Text of sixteen characters a token, which fits: no call tokenizes more than two slices, the last one neither."""
    sizes: list[int] = []

    def encode(piece: str) -> array[int]:
        sizes.append(len(piece))
        return array("I", [1] * (len(piece) // 16 + 1))

    tokenizer = PromptTokenizer(model("smollm2")[0], None, encode=encode)
    text = lines(50_000)
    request = parse_request(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": text}).encode())
    draft = tokenizer.start(request, most_tokens=len(text) // 12)
    assert isinstance(draft, Draft)
    calls = 0
    while draft.unknown_chars > SLICE_CHARS:
        sizes.clear()
        draft.advance()
        calls += 1
        assert sum(sizes) <= 2 * SLICE_CHARS
    sizes.clear()
    draft.finish()
    assert sum(sizes) <= 2 * SLICE_CHARS
    assert calls > 2 * len(text) // SLICE_CHARS - 2
