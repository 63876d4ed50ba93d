"""``homing bench decide``: a long conversation's next turn, from its decoded body to the opened lease.

The router's own brain over a fleet of so many ranks, all of which hold the conversation's first part, and one all of
it. Each turn adds a reply and a question, or with ``--calls`` a call of a tool and its result; then the rank's cache
events come in, as they would. Nothing is cached but what the router itself keeps from turn to turn.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry

from engine_shim.model.tokenizer import read_card
from router.bench.running import CannotRun
from router.core.cost import CostParameters
from router.core.policy import make_policy
from router.core.types import Engine, RankId, RankStatus, RouteRequest
from router.fleet.fleet import Fleet
from router.fleet.target import Target
from router.option_values import whole
from router.proxy.brain import RouterBrain
from router.proxy.tokenization import PromptTokenizer
from router.proxy.types import Outcome
from router.settings import RoutingSettings
from router.telemetry.metrics import Metrics
from router.wire.block_keys import block_keys, namespace_seed
from router.wire.kv_events import BlockStored, EventBatch
from router.wire.openai import Endpoint, parse_request

_MODEL = "bench"
_BLOCK_TOKENS = 16
#: Every rank holds so much of the conversation: a system prompt with its tools.
_SHARED_TOKENS = 20_000
_HEADERS = {"x-session-id": "bench"}
#: Prose, code, numbers, marks and blanks, as agents' contexts have them.
_WORDS = (
    *("def", "self", "return", "import", "the", "file", "error", "line", "test", "value", "path", "none", "class"),
    *("request", "because", "should", "would", "there", "about", "which", "configuration", "index", "token", "block"),
    *("function,", "parameter;", "(string)", "[list]", "{dict}", "==", "!=", "0x1f", "42", "3.14", "//", "'it's'"),
    *("\n   ", "\n\t", '"quoted', 'text"', "snake_case_name", "CamelCaseName", "https://a.org/b?c=d", "end.\nNext"),
)
#: Of tools and their calls, as most templates write them.
_CALLS_TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}{{ '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
        {{- '\\n<result>\\n' + message.content + '\\n</result>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson + '}\\n</call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""
_TOOLS = 20


@dataclass(slots=True)
class Timings:
    """Milliseconds of each part, a turn an entry."""

    parse: list[float] = field(default_factory=list)
    prepare: list[float] = field(default_factory=list)
    choose: list[float] = field(default_factory=list)
    decide: list[float] = field(default_factory=list)
    turn_cpu: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


def main(argv: Sequence[str]) -> int:
    """Returns the exit status: 0 whatever the figures are, 1 for a tokenizer that is not here."""
    parser = argparse.ArgumentParser(
        prog="homing bench decide", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=whole(1), nargs="+", default=[64, 1000], help="fleet sizes (default: 64 1000)")
    parser.add_argument("--tokens", type=whole(1), default=100_000, help="of the conversation so far")
    parser.add_argument("--new-tokens", type=whole(2), default=800, help="that a turn adds, half of them the reply")
    parser.add_argument("--turns", type=whole(2), default=40, help="to measure")
    parser.add_argument("--calls", action="store_true", help="turns are calls of tools and their results")
    parser.add_argument("--tokenizer", default="smollm2", help="smollm2, needle, a model's folder or a GGUF file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(argv)
    try:
        card = read_card(options.tokenizer)
    except Exception as error:  # of its JSON, its template, its extra's packages, and of tokenizers a bare Exception
        raise CannotRun(str(error)) from error
    template = _CALLS_TEMPLATE if options.calls else card.chat_template
    if template is None:
        raise CannotRun(f"{options.tokenizer} has no chat template")
    config = {"chat_template": template, "bos_token": card.bos_token, "eos_token": card.eos_token}
    results = {}
    for ranks in options.ranks:
        tokenizer = PromptTokenizer.from_files(card.tokenizer.to_str().encode(), config)
        timings = asyncio.run(
            measure(
                tokenizer,
                ranks=ranks,
                tokens=options.tokens,
                new_tokens=options.new_tokens,
                turns=options.turns,
                makes_calls=options.calls,
            )
        )
        results[str(ranks)] = _summary(timings)
    told = {"tokenizer": options.tokenizer, "new_tokens": options.new_tokens, "ranks": results}
    if options.json:
        print(json.dumps(told))
    else:
        for ranks, result in results.items():
            parts = ", ".join(f"{name} {value:.3f}" for name, value in result.items() if name.endswith("p50"))
            print(f"{ranks} ranks, {result['prompt_tokens']:.0f} tokens: {parts}")
    return 0


async def measure(
    tokenizer: PromptTokenizer, *, ranks: int, tokens: int, new_tokens: int, turns: int, makes_calls: bool = False
) -> Timings:
    """Let a conversation grow, then time so many turns of it as its prompt passes ``tokens``."""
    settings, metrics = RoutingSettings(), Metrics(CollectorRegistry())
    fleet = Fleet(settings, metrics, clock=time.monotonic)
    for number in range(ranks):
        slot = fleet.add_rank(
            RankId(f"worker-{number // 8}", number % 8),
            target=Target("127.0.0.1", 8000 + number // 8, number % 8, 8, Engine.VLLM),
            models=frozenset({_MODEL}),
            block_tokens=_BLOCK_TOKENS,
            pool_tokens=2_000_000,
        )
        fleet.set_status(slot, RankStatus.READY)
    brain = RouterBrain(fleet, settings=settings, metrics=metrics)
    brain.set_tokenizer(_MODEL, tokenizer)
    policy = make_policy("affinity", CostParameters())
    rng = random.Random(7)
    words_a_token = _words_a_token(tokenizer)

    def text(count_tokens: int) -> str:
        return " ".join(rng.choices(_WORDS, k=max(1, round(count_tokens * words_a_token))))

    fields: dict[str, Any] = {"model": _MODEL, "stream": True}
    if makes_calls:
        fields["tools"] = [_tool(number, text(300)) for number in range(_TOOLS)]
    messages: list[dict[str, Any]] = [{"role": "system", "content": text(min(_SHARED_TOKENS, tokens))}]
    held = 0
    timings = Timings()
    per_message = new_tokens // 2
    while len(timings.parse) < turns:
        if makes_calls:
            call = {"name": "edit", "arguments": json.dumps({"path": text(10), "text": text(per_message - 20)})}
            messages += [
                {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "type": "function", "function": call}]},
                {"role": "tool", "tool_call_id": "1", "content": text(per_message)},
            ]
        else:
            messages += [
                {"role": "assistant", "content": text(per_message)},
                {"role": "user", "content": text(per_message)},
            ]
        body = json.dumps({**fields, "messages": messages}).encode()
        began = time.perf_counter()
        request = parse_request(Endpoint.CHAT, body)
        parsed, parsed_cpu = time.perf_counter(), time.process_time()
        prepared = await brain.prepare(request, _HEADERS, tenant="bench")
        keyed = time.perf_counter()
        attempt = brain.choose(prepared)
        chosen, chosen_cpu = time.perf_counter(), time.process_time()
        assert prepared.tokens is not None
        if len(prepared.tokens) >= tokens - turns * new_tokens // 2:  # so that on average it is as long as asked for
            timings.tokens.append(len(prepared.tokens))
            timings.parse.append(1e3 * (parsed - began))
            timings.prepare.append(1e3 * (keyed - parsed))
            timings.choose.append(1e3 * (chosen - keyed))
            timings.turn_cpu.append(1e3 * (chosen_cpu - parsed_cpu))
            route = RouteRequest(
                model=_MODEL,
                prompt_tokens=prepared.prompt_tokens,
                output_tokens=prepared.output_tokens,
                reusable_tokens=fleet.indexes(_MODEL)[0].reusable_tokens(
                    prepared.keys(_BLOCK_TOKENS), prompt_tokens=prepared.prompt_tokens
                ),
                session=prepared.session,
                home=attempt.decision.slot,
            )
            began = time.perf_counter()
            policy(fleet.view, route, rng, time.monotonic())
            timings.decide.append(1e3 * (time.perf_counter() - began))
        attempt.lease.first_byte()
        attempt.lease.close(Outcome.OK, None)
        if not held:
            for slot in range(ranks):
                _publish(fleet, slot, prepared.tokens[:_SHARED_TOKENS], start=0)
            held = min(_SHARED_TOKENS, len(prepared.tokens)) // _BLOCK_TOKENS
        _publish(fleet, attempt.decision.slot, prepared.tokens, start=held)
        held = len(prepared.tokens) // _BLOCK_TOKENS
    return timings


def _publish(fleet: Fleet, slot: int, tokens: array[int], *, start: int) -> None:
    """The rank's events tell of all whole blocks from ``start`` on."""
    keys = block_keys(tokens, block_tokens=_BLOCK_TOKENS, parent=namespace_seed("", ""))
    event = BlockStored(
        tuple(keys[start:]),
        keys[start - 1] if start else None,
        tokens[start * _BLOCK_TOKENS : len(keys) * _BLOCK_TOKENS],
        _BLOCK_TOKENS,
    )
    if event.hashes:
        fleet.apply(slot, EventBatch(0.0, (event,)), now=time.monotonic())


def _tool(number: int, description: str) -> dict[str, Any]:
    properties = {"path": {"type": "string"}, "text": {"type": "string", "description": "what to write there"}}
    parameters = {"type": "object", "properties": properties, "required": ["path"]}
    return {
        "type": "function",
        "function": {"name": f"tool_{number}", "description": description, "parameters": parameters},
    }


def _words_a_token(tokenizer: PromptTokenizer) -> float:
    words = random.Random(1).choices(_WORDS, k=2000)
    return len(words) / len(tokenizer.ids(" ".join(words)))


def _summary(timings: Timings) -> dict[str, float]:
    """Milliseconds: medians, and the 99th percentile of the whole. ``turn`` leaves out decoding the body's JSON.

    ``turn_cpu`` is what it costs where others keep the machine busy meanwhile.
    """
    turn = [sum(parts) for parts in zip(timings.prepare, timings.choose, strict=True)]
    return {
        "prompt_tokens": statistics.median(timings.tokens),
        "turn_ms_p50": statistics.median(turn),
        "turn_ms_p99": statistics.quantiles(turn, n=100)[98],
        "turn_cpu_ms_p50": statistics.median(timings.turn_cpu),
        "parse_ms_p50": statistics.median(timings.parse),
        "tokens_and_keys_ms_p50": statistics.median(timings.prepare),
        "lookup_and_decision_ms_p50": statistics.median(timings.choose),
        "decision_ms_p50": statistics.median(timings.decide),
    }
