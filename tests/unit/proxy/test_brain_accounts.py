"""The accounts that the brain keeps of promises, and prompts that it knows as text only."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_shim.model.needle_text import filler
from router.core.types import RankStatus, Reason
from router.proxy.promises import PROVISIONAL_SECONDS
from router.proxy.tokenization import PromptTokenizer
from router.proxy.types import Outcome
from router.settings import Policy
from router.wire.openai import Endpoint, parse_request
from router.wire.usage import Usage, parse_usage
from tests.fakes.brain_world import BLOCK, FILES, TOKENIZER, World, prompt_of

# --- accounts ---------------------------------------------------------------------------------------------------


async def test_what_was_promised_is_compared_with_what_was() -> None:
    """Three requests of 100 tokens on one rank: cold as foretold; 96 foretold and found; 96 foretold, 32 found."""
    world = World(ranks=1)
    for found in (0, 96, 32):
        (await world.ask(prompt_of(100))).lease.close(Outcome.OK, Usage(100, 7, found))

    names = ("prompt_tokens", "cached_tokens", "predicted_cached_tokens", "best_cached_tokens", "ideal_cached_tokens")
    assert [world.rank_sample(f"{name}_total", 0) for name in names] == [300, 128, 192, 192, 192]
    labels = {"worker": "w0", "rank": "0"}
    missed = [world.sample("mispredicted_requests_total", **labels, direction=name) for name in ("over", "under")]
    assert missed == [1, 0]
    assert world.fleet.member(0).trust.ratio == pytest.approx(1 - 0.1 * (1 - 32 / 96))


async def test_the_best_rank_is_counted_beside_the_chosen() -> None:
    """Taken in turn, the second request goes where 32 tokens lie, though 96 lie elsewhere; a rank that is down holds
    nothing that counts."""
    world = World(ranks=2, policy=Policy.ROUND_ROBIN)
    world.publish(0, prompt_of(96))
    world.publish(1, prompt_of(32))
    prepared = await world.prepare(prompt_of(100))
    decisions = []
    for _ in range(2):
        attempt = world.brain.choose(prepared)
        attempt.lease.close(Outcome.OK, Usage(100, 1, attempt.decision.expected_cached_tokens))
        decisions.append(attempt.decision)
    world.fleet.set_status(0, RankStatus.DOWN)
    world.now += PROVISIONAL_SECONDS
    decisions.append(world.brain.choose(prepared).decision)

    assert [(each.slot, each.expected_cached_tokens, each.best_cached_tokens) for each in decisions] == [
        (0, 96, 96),
        (1, 32, 96),
        (1, 32, 32),
    ]
    names = ("predicted_cached_tokens_total", "best_cached_tokens_total")
    assert [world.rank_sample(name, 1) for name in names] == [32, 96]


@pytest.mark.parametrize(("outcome", "usage"), [(Outcome.RESET, Usage(100, 7, 0)), (Outcome.OK, None)])
async def test_without_a_whole_answer_nothing_is_compared(outcome: Outcome, usage: Usage | None) -> None:
    """Neither a broken answer nor one without usage judges a rank."""
    world = World(ranks=1)
    world.publish(0, prompt_of(96))
    (await world.ask(prompt_of(100))).lease.close(outcome, usage)

    assert world.rank_sample("prompt_tokens_total", 0) == 0
    assert world.fleet.member(0).trust.ratio == 1.0


@pytest.mark.parametrize("outcome", [Outcome.PUSHBACK, Outcome.CLIENT_ERROR])
async def test_what_fails_in_the_middle_was_work(outcome: Outcome) -> None:
    """A refusal before the first token is no work for the rank; with one its prompt had been computed."""
    world = World(ranks=1)
    load = world.fleet.member(0).load
    refused = (await world.ask(prompt_of(100))).lease
    sent_seconds = load.recent_seconds
    refused.close(outcome, None)
    assert load.recent_seconds == pytest.approx(0)

    begun = (await world.ask(prompt_of(100, start=500))).lease
    begun.first_byte()
    begun.close(outcome, None)
    assert load.recent_seconds == pytest.approx(sent_seconds)


async def test_what_a_whole_answer_takes_is_no_speed() -> None:
    """It is there a minute after its prompt should have been computed: most of that it was generated. A stream's first
    token at twice its time tells of a slower rank."""
    world = World(ranks=1)
    pace = world.fleet.member(0).pace
    factor = pace.factor
    whole = await world.ask(prompt_of(1000), max_tokens=300)
    world.now += whole.decision.expected_prefill_seconds + 60.0
    whole.lease.first_byte()
    whole.lease.close(Outcome.OK, Usage(1000, 300, 0))
    assert pace.factor == factor

    streamed = await world.ask(prompt_of(1000, start=10_000), max_tokens=300, stream=True)
    world.now += 2.0 * streamed.decision.expected_prefill_seconds
    streamed.lease.first_byte()
    assert pace.factor > factor


async def test_a_whole_answer_sooner_than_its_prompt_should_take_tells_the_speed() -> None:
    """However long the answer took, its prompt took less."""
    world = World(ranks=1)
    pace = world.fleet.member(0).pace
    whole = await world.ask(prompt_of(1000), max_tokens=300)
    factor = pace.factor
    world.now += 0.5 * whole.decision.expected_prefill_seconds
    whole.lease.first_byte()

    assert pace.factor < factor


async def test_a_whole_answer_is_no_sooner_for_the_end_of_another() -> None:
    """The second of two is there a tenth of a second after the first, for which it did not wait: its prompt took no
    more than all its time, which is half of what it should take.
    """
    world = World(ranks=1)
    pace = world.fleet.member(0).pace
    first = await world.ask(prompt_of(1000), max_tokens=300)
    world.now += 60.0
    second = await world.ask(prompt_of(20_000, start=10_000), max_tokens=300)
    seconds = second.decision.expected_prefill_seconds
    world.now += 0.5 * seconds - 0.1
    first.lease.first_byte()
    first.lease.close(Outcome.OK, Usage(1000, 300, 0))
    assert pace.factor == 1.0
    world.now += 0.1
    second.lease.first_byte()

    assert pace.factor == pytest.approx(0.5)


async def test_a_rank_that_takes_nothing_is_left_alone_and_comes_back() -> None:
    """One rank answers 503 to all that it is sent for 5 s: then the other one gets everything, until one request in a
    while is taken. What was turned away counts as no work: the rank that is back is the idler one.
    """
    world = World(ranks=2, breaker_seconds=5.0)
    places: list[list[int]] = [[], [], []]
    for number in range(240):
        world.now += 0.5
        part, attempt = number // 80, await world.ask(prompt_of(1000, start=2000 * number))
        if part < 2 and attempt.decision.slot == 0:
            attempt.lease.close(Outcome.PUSHBACK, None)
        else:
            attempt.lease.first_byte()
            attempt.lease.close(Outcome.OK, Usage(1000, 1, 0))
        places[part].append(attempt.decision.slot)

    assert places[1].count(0) <= 40.0 / 5.0
    assert places[2].count(0) > places[2].count(1)


async def test_an_engine_that_does_not_tell_reuse_is_not_judged() -> None:
    """``cached_tokens`` absent is not zero."""
    world = World(ranks=1)
    world.publish(0, prompt_of(96))
    (await world.ask(prompt_of(100))).lease.close(Outcome.OK, Usage(100, 7, None))

    assert world.fleet.member(0).trust.ratio == 1.0


@pytest.mark.parametrize(("said", "counted"), [((-5, -5), (0, 0)), ((100, 900), (100, 100)), ((100, -1), (100, 0))])
async def test_impossible_usage_breaks_nothing(said: tuple[int, int], counted: tuple[int, int]) -> None:
    """A worker may report what it likes: counters only grow, and reuse is at most the prompt."""
    world = World(ranks=1)
    details = {"cached_tokens": said[1]}
    told = {"usage": {"prompt_tokens": said[0], "completion_tokens": 1, "prompt_tokens_details": details}}
    (await world.ask(prompt_of(100))).lease.close(Outcome.OK, parse_usage(json.dumps(told).encode()))

    assert (world.rank_sample("prompt_tokens_total", 0), world.rank_sample("cached_tokens_total", 0)) == counted


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(0, 15), st.sampled_from("mn")),
        min_size=1,
        max_size=10,
    )
)
async def test_the_ideal_is_what_an_endless_cache_would_reuse(prompts: list[tuple[list[int], int, str]]) -> None:
    """Whole blocks shared with any earlier prompt of the model, at most all but the last token: found pair by pair."""
    world = World(ranks=1)
    world.add("other", models=frozenset({"n"}))
    world.brain.set_tokenizer("n", TOKENIZER)
    earlier: list[tuple[list[int], str]] = []
    for blocks, rest, model in prompts:
        tokens = [token for block in blocks for token in [block] * BLOCK] + [9] * rest
        shared = [0]
        for other, its_model in earlier:
            if its_model == model:
                same = next((i for i, (a, b) in enumerate(zip(tokens, other, strict=False)) if a != b), None)
                shared.append(min(len(tokens), len(other)) if same is None else same)
        expected = min(max(shared) // BLOCK, (len(tokens) - 1) // BLOCK) * BLOCK
        earlier.append((tokens, model))

        assert (await world.prepare(tokens, model=model)).ideal_tokens == expected


async def test_an_empty_prompt_is_served_like_any_other() -> None:
    """No token, no block, no negative count."""
    world = World(ranks=1)
    attempt = await world.ask("")
    attempt.lease.first_byte()
    attempt.lease.close(Outcome.OK, Usage(0, 1, 0))

    assert (attempt.decision.expected_cached_tokens, world.rank_sample("ideal_cached_tokens_total", 0)) == (0, 0)


async def test_how_prompts_were_keyed_is_counted() -> None:
    """By tokens where a tokenizer has a say, by text where it has none: of several prompts there is no single chain."""
    world = World(ranks=1)
    await world.prepare([1, 2])
    await world.prepare(["two " * 100, "prompts " * 100])

    assert (world.sample("prompts_total", keyed="tokens"), world.sample("prompts_total", keyed="text")) == (1, 1)


async def test_a_long_body_is_keyed_as_a_short_one() -> None:
    """Tokenized beside the event loop, with the same result."""
    world = World(ranks=1)
    messages = [{"role": "user", "content": filler(30_000, seed=3)}]
    long = await world.prepare(messages)

    direct = PromptTokenizer.from_files(*FILES)
    body = json.dumps({"model": "m", "messages": messages}).encode()
    assert len(body) > 64 * 1024
    assert long.tokens == direct.encode(parse_request(Endpoint.CHAT, body))


# --- without a tokenizer -------------------------------------------------------------------------------------------


async def test_text_keeps_a_conversation_on_its_rank() -> None:
    """Growing prompts without a session follow their text, while others' text goes by load."""
    world = World(ranks=6, tokens=False)
    homes = {}
    for turn in range(1, 6):
        for name in ("a", "b", "c"):
            attempt = await world.ask("".join(f"{name} says {filler(400, seed=part)}" for part in range(turn)))
            attempt.lease.first_byte()
            attempt.lease.close(Outcome.OK, None)
            world.now += 1.0
            assert attempt.decision.reason is (Reason.COLD if turn == 1 else Reason.PREFIX)
            assert homes.setdefault(name, attempt.decision.slot) == attempt.decision.slot
    assert len(set(homes.values())) == 3


async def test_text_is_counted_in_blocks_of_256_bytes_as_64_tokens() -> None:
    """A prompt of 1,000 letters is 1,002 bytes as JSON: 3 whole blocks, 192 tokens of them."""
    world = World(ranks=1, tokens=False)
    await world.ask("x" * 1000)

    assert (await world.ask("x" * 1000)).decision.expected_cached_tokens == 192


async def test_a_text_never_promises_all_of_a_prompt() -> None:
    """JSON written anew may be longer than the body was: 1e300 takes more room written out."""
    world = World(ranks=1, tokens=False)
    message = {"role": "user", "content": "x", "numbers": [10**15] * 100}
    raw = json.dumps({"model": "m", "messages": [message]}, separators=(",", ":")).replace("1000000000000000", "1e15")
    request = parse_request(Endpoint.CHAT, raw.encode())
    for _ in range(2):
        attempt = world.brain.choose(await world.brain.prepare(request, {}, tenant="t"))

    assert 0 < attempt.decision.expected_cached_tokens < len(raw) // 4
    assert world.rank_sample("rank_waiting_tokens", 0) > 0


@pytest.mark.parametrize("change", ["messages", "tools", "cache_salt"])
async def test_other_text_has_other_keys(change: str) -> None:
    """Messages, tools and salt are all part of what a prefix is."""
    fields: dict[str, Any] = {
        "messages": [{"role": "user", "content": "word " * 200}],
        "tools": [{"type": "function", "function": {"name": "f"}}],
        "cache_salt": "a",
    }
    other = {
        "messages": [{"role": "system", "content": "word " * 200}],
        "tools": [{"type": "function", "function": {"name": "g"}}],
        "cache_salt": "b",
    }
    world = World(ranks=1, tokens=False)
    keys = []
    for values in (fields, dict(fields), {**fields, change: other[change]}):
        messages = values.pop("messages")
        keys.append(list((await world.prepare(messages, **values)).text_keys))

    assert keys[0] == keys[1] != keys[2]
    assert keys[0][0] != keys[2][0]


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ANSWER = "the house by the river stood open all day and " * 8


@pytest.mark.parametrize(("spoken", "counts"), [(0, True), (1, True), (2, False)])
async def test_the_next_turn_tells_what_the_answer_left_behind(spoken: int, *, counts: bool) -> None:
    """Before any event: the answer's blocks count once its text is back, ended by as many tokens as it had.

    ``spoken`` tokens more than the text has were reported: the end-of-turn token may be among them, others not.
    """
    expected, length, said = await next_turn(spoken=spoken, first_words=None)

    computed = length + said + spoken - 1  # the last token's own keys and values are never computed
    assert expected == (computed if counts else length) // BLOCK * BLOCK


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        (ANSWER, True),
        ("\nthe house by", True),  # what was kept of it
        ("", True),  # a tool's call has no text
        ("the house at the river stood open all day", False),
        ("a", False),
    ],
)
async def test_a_text_as_long_as_the_answer_is_not_the_answer_if_it_begins_otherwise(
    words: str, *, counts: bool
) -> None:
    """Its tokens are in no cache."""
    expected, length, said = await next_turn(spoken=1, first_words=lambda: words)

    assert expected == (length + said if counts else length) // BLOCK * BLOCK


async def next_turn(*, spoken: int, first_words: Callable[[], str] | None) -> tuple[int, int, int]:
    """What is expected of a conversation's second prompt, and the tokens of its first prompt and answer."""
    world = World(ranks=1)
    world.brain.set_tokenizer("m", PromptTokenizer.from_files(FILES[0], {"chat_template": CHATML}))
    first = [{"role": "user", "content": "go on for a while " * 10}]
    second = [*first, {"role": "assistant", "content": ANSWER}, {"role": "user", "content": "and then"}]
    length = len((await world.prepare(first)).tokens or ())
    said = len(TOKENIZER.ids(ANSWER))
    attempt = await world.ask(first, session="s")
    attempt.lease.close(Outcome.OK, Usage(length, said + spoken, 0), first_words=first_words)
    world.now += 0.1
    return (await world.ask(second, session="s")).decision.expected_cached_tokens, length, said


async def test_the_time_of_an_earlier_answer_ends_with_that_answer() -> None:
    """Two turns of one session within the time that promises have: the first one's is over, the second one's is not."""
    world = World(ranks=1)
    world.brain.set_tokenizer("m", PromptTokenizer.from_files(FILES[0], {"chat_template": CHATML}))
    messages, said = [{"role": "user", "content": "go on for a while " * 10}], len(TOKENIZER.ids(ANSWER))
    expected = length = before = 0
    for _ in range(3):
        before, length = length, len((await world.prepare(messages)).tokens or ())
        attempt = await world.ask(messages, session="s")
        expected = attempt.decision.expected_cached_tokens
        attempt.lease.close(Outcome.OK, Usage(length, said + 1, 0))
        world.now += 0.6 * PROVISIONAL_SECONDS
        await world.ask(prompt_of(20))  # what is past its time goes when somebody asks
        messages += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "and then"}]

    assert expected == (before + said) // BLOCK * BLOCK
