"""A conversation's next turn, rendered from where the last one ended: the same text as rendered whole."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import router.wire.chat_template as chat_template
from router.wire.chat_template import ChatTemplate, TemplateRefusal
from router.wire.rendered_heads import FEWEST_MESSAGES, Rendering

#: Loops over messages as chat templates write them. Each goes on.
RESUMED = {
    "plain": "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ '>' if add_generation_prompt }}",
    "neighbours": (
        "{% for m in messages %}{% if loop.previtem and loop.previtem.role != m.role %}^{% endif %}{{ m.content }}"
        "{% if not loop.last and loop.nextitem.role == m.role %}+{% elif loop.last %}.{% endif %}{% endfor %}"
    ),
    "places": (
        "{% for m in messages %}{% if loop.first or (messages[loop.index0 - 1].role != 'tool') %}<{% endif %}"
        "{{ loop.index }}{{ m.content }}{% if loop.last or (messages[loop.index0 + 1].role != 'tool') %}>{% endif %}"
        "{% endfor %}"
    ),
    "rest": (
        "{% if messages[0].role == 'system' %}{% set head = messages[0].content %}{% set rest = messages[1:] %}"
        "{% else %}{% set head = 'none' %}{% set rest = messages %}{% endif %}{{ head }}"
        "{% for m in rest %}{% if m.role == 'user' and loop.first %}{{ head }}{% endif %}"
        "{% if loop.index0 and messages[loop.index0].role == 'tool' %}~{% endif %}{{ m.content }}{% endfor %}"
    ),
    "same name": "{% set messages = messages[1:] %}{% for m in messages %}{{ loop.index0 }}{{ m.content }}{% endfor %}",
    "last question": (
        "{% set ns = namespace(open=true, last=messages|length - 1) %}{% for m in messages[::-1] %}"
        "{% if ns.open and m.role == 'user' %}{% set ns.open = false %}"
        "{% set ns.last = messages|length - 1 - loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% set text = m.content %}{% if m.role == 'assistant' and loop.index0 < ns.last %}"
        "{% set text = text.split('=')[-1] %}{% endif %}{{ text }}|{% endfor %}"
    ),
    "state": (
        "{% set ns = namespace(tool=false, count=0) %}{% for m in messages %}{% if m.role == 'tool' %}"
        "{% if not ns.tool %}<tools>{% endif %}{% set ns.tool = true %}{% set ns.count = ns.count + 1 %}"
        "{% elif ns.tool %}</tools>{% set ns.tool = false %}{% endif %}{{ m.content }}{% endfor %}"
        "{{ ns.count }}{% if ns.tool %}</tools>{% endif %}"
    ),
    "macro": (
        "{% macro show(m, mark) %}{{ mark }}{{ style }}{% for call in m.tool_calls or [] %}"
        "{{ call.function.arguments | tojson }}{% if not loop.last %},{% endif %}{% endfor %}{% endmacro %}"
        "{% set style = 'x' if tools else 'y' %}{% for m in messages %}{{ show(m, loop.index) }}{% endfor %}"
    ),
    "branches": (
        "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% for m in messages %}T{{ m.content }}"
        "{% endfor %}{% else %}{% for m in messages %}{{ m.content }}{{ thinking }}{% endfor %}{% endif %}"
    ),
    "two loops": "{% for m in messages %}{{ m.role }}{% endfor %}={% for m in messages %}{{ m.content }}{% endfor %}",
    "breaks": (
        "{% for m in messages %}{% if m.content == 'stop' %}{% break %}{% endif %}{{ m.role }}"
        "{% if m.role == 'tool' %}{% continue %}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "beyond": "{% for m in messages %}{{ (messages[loop.index0 + 2] or m).content }}{{ m.content }}{% endfor %}",
    "namespace of a branch": (
        "{% if tools %}{% set ns = namespace(n=0) %}{% endif %}{% for m in messages %}{% if tools %}{{ ns.n }}"
        "{% endif %}{{ m.content }}{% endfor %}"
    ),
    "namespace of later on": (
        "{% macro mark() %}{{ ns.n }}{% endmacro %}{% for m in messages %}{{ m.content }}{% endfor %}"
        "{% set ns = namespace(n=1) %}{{ mark() }}"
    ),
    "macro's name": (
        "{% macro text() %}{% endmacro %}{% set text = messages[-1].role %}"
        "{% for m in messages %}{{ text }}{{ m.content }}{% endfor %}"
    ),
    "outer name": (
        "{% set text = 'outer' %}{% for m in messages %}{% if m.role == 'user' %}{% set text = m.content %}{% endif %}"
        "{{ text }}{% endfor %}"
    ),
}
#: What may depend on all messages, on the moment or on chance, or keeps what has no name: rendered whole each time.
WHOLE = {
    "length": "{% for m in messages %}{{ loop.revindex }}/{{ loop.length }}{{ m.content }}{% endfor %}",
    "all": "{% for m in messages %}{{ messages | length }}{{ messages[-1].content }}{{ m.content }}{% endfor %}",
    "back": "{% for m in messages %}{{ messages[loop.index0 - 2].content }}{{ m.content }}{% endfor %}",
    "first ones": "{% for m in messages[:-1] %}{{ m.content }}{% endfor %}{{ messages[-1].role }}",
    "reversed": "{% for m in messages | reverse %}{{ m.content }}{% endfor %}",
    "chosen": "{% for m in messages if m.role != 'tool' %}{{ m.content }}{% endfor %}",
    "chosen before": "{% for m in messages | rejectattr('role', 'equalto', 'tool') %}{{ m.content }}{% endfor %}",
    "list": (
        "{% set ns = namespace(seen=[]) %}{% for m in messages %}{% if m.role not in ns.seen %}"
        "{% set ns.seen = ns.seen + [m.role] %}{% endif %}{{ ns.seen | join }}{{ m.content }}{% endfor %}"
    ),
    "joiner": "{% set comma = joiner(',') %}{% for m in messages %}{{ comma() }}{{ m.content }}{% endfor %}",
    "cycle": "{% for m in messages %}{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}{{ m.content }}{% endfor %}",
    "no namespace": (
        "{% if tools %}{% set ns = namespace(n=0) %}{% endif %}{% for m in messages %}"
        "{% if tools %}{% set ns.n = 1 %}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "chance": "{% for m in messages %}{{ [[m.content]] | map('random') | first }}{% endfor %}",
    "inner head": "{% for m in messages %}{% for n in range(loop.length) %}{{ n }}{% endfor %}{{ m.role }}{% endfor %}",
    "captured": "{% set all %}{% for m in messages %}{{ m.content }}{% endfor %}{% endset %}{{ all }}",
    "caller": (
        "{% macro box() %}[{{ caller() }}]{% endmacro %}"
        "{% for m in messages %}{% call box() %}{{ m.content }}{% endcall %}{% endfor %}"
    ),
}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]


def grown(rng: random.Random, count: int, contents: Sequence[str] = ("a", "b=c", "", "x" * 50)) -> list[dict[str, Any]]:
    """So many messages of an agent's conversation."""
    made: list[dict[str, Any]] = []
    for _ in range(count):
        role = rng.choice(["user", "assistant", "tool", "tool"]) if made else rng.choice(["system", "user"])
        message: dict[str, Any] = {"role": role, "content": rng.choice(contents)}
        if role == "assistant" and rng.random() < 0.5:
            call = {"name": "f", "arguments": rng.choice(['{"a": 1}', '{"a": 1.0, "b": [true, null]}', "no json"])}
            message["tool_calls"] = [{"id": "1", "function": call}] * rng.randint(1, 2)
        made.append(message)
    return made


def both(template: ChatTemplate, messages: Sequence[Mapping[str, Any]], **fields: Any) -> list[str]:
    """The text as the template has it now, and as one that remembers nothing has it; or that both refuse."""
    texts = []
    for one in (template, fresh(template)):
        try:
            texts.append(one.render(copy.deepcopy(messages), **fields))
        except TemplateRefusal:
            texts.append("refused")
    return texts


def fresh(template: ChatTemplate) -> ChatTemplate:
    other = copy.copy(template)
    other._resumable = None
    return other


@pytest.mark.parametrize("source", [*RESUMED.values(), *WHOLE.values()], ids=[*RESUMED, *WHOLE])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_turn_by_turn_the_text_is_the_whole_one(source: str, seed: int) -> None:
    """Conversations that grow, are asked again, fork, lose turns or change in the middle, with other tools at times."""
    rng = random.Random(seed)
    template = ChatTemplate(source, variables={"bos_token": "<s>"})
    conversations = [grown(rng, rng.randint(1, 12))]
    for _ in range(12):
        messages = rng.choice(conversations)
        match rng.randint(0, 9):
            case 0:
                messages = messages[: rng.randint(1, len(messages))]
            case 1:
                messages = [*messages]
                messages[rng.randrange(len(messages))] = {"role": "user", "content": "changed"}
            case 2:
                messages = [*messages, {"role": "developer", "content": "stop"}]
            case _:
                messages = messages + grown(rng, rng.randint(0, 4), ("new", "b=c", "stop"))[1:]
        conversations.append(messages)
        fields: dict[str, Any] = {"add_generation_prompt": rng.random() < 0.8}
        if rng.random() < 0.3:
            fields["tools"] = TOOLS * rng.randint(1, 2)
        if rng.random() < 0.3:
            fields["extra"] = rng.choice([{"thinking": True}, {"thinking": 1}, {"text": "extra"}, {"style": [1]}])
        now, whole = both(template, messages, **fields)
        assert now == whole


@pytest.mark.parametrize("source", RESUMED.values(), ids=RESUMED)
def test_a_turn_goes_on_where_the_last_one_ended(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of thirty messages that were there before it sees the last four at the most again."""
    template = ChatTemplate(source, variables={})
    messages = [{"role": ("user", "assistant", "tool")[at % 3], "content": f"m{at}"} for at in range(30)]
    template.render(messages)
    seen = []
    found = template._heads.find
    monkeypatch.setattr(template._heads, "find", lambda names: seen.append(found(names)) or seen[-1])
    # A call of tools goes on: the last question stays where it is.
    template.render([*messages, {"role": "assistant", "content": "m"}, {"role": "tool", "content": "n"}])

    assert seen
    assert all(head is not None and head[1].messages >= 26 for head in seen)


def test_a_loop_tells_of_its_last_messages_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """To tell takes more time than most messages: a conversation that nobody has seen would take ten times as long."""
    told = []
    mark = Rendering._mark
    monkeypatch.setattr(Rendering, "_mark", lambda self, at, *more: told.append(at) or mark(self, at, *more))
    ChatTemplate(RESUMED["plain"], variables={}).render([{"role": "user", "content": "m"}] * 100)

    assert told == [97, 98, 99, 100]


@pytest.mark.parametrize("source", WHOLE.values(), ids=WHOLE)
def test_what_depends_on_more_is_never_remembered(source: str) -> None:
    template = ChatTemplate(source, variables={})
    template.render(grown(random.Random(1), 30))

    assert len(template._heads) == 0


def test_the_moment_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A date in the loop is today's, and one before it gives other texts tomorrow."""
    days = iter("123456789")
    inside = "{% for m in messages %}{{ strftime_now('%d') }}{{ m.content }}{% endfor %}"
    before = "{% set day = strftime_now('%d') %}{% for m in messages %}{{ day }}{{ m.content }}{% endfor %}"

    class Clock:
        @staticmethod
        def now() -> Any:
            return Clock()

        def strftime(self, form: str) -> str:
            return next(days)

    monkeypatch.setattr(chat_template, "datetime", Clock)
    for source in (inside, before):
        template = ChatTemplate(source, variables={})
        messages = [{"role": "user", "content": "m"}] * FEWEST_MESSAGES
        assert template.render(messages) != template.render(messages)
        days = iter("123456789")


def test_equal_numbers_of_other_types_are_other_texts() -> None:
    """True is no 1, and 1.0 is neither: keys of a table would say so, and a template writes them apart."""
    template = ChatTemplate("{% for m in messages %}{{ m.n }}{{ n }}{{ m.content }}{% endfor %}", variables={})
    for n in (1, True, 1.0, "1", None):
        messages = [{"role": "user", "content": "m", "n": n}] * FEWEST_MESSAGES
        assert template.render(messages, extra={"n": 1}) == f"{n}1m" * FEWEST_MESSAGES
        assert template.render(messages, extra={"n": True}) == f"{n}Truem" * FEWEST_MESSAGES


def test_it_is_bounded_and_forgets_the_longest_unused() -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", variables={})
    template._heads.max_bytes = 10_000
    for conversation in range(50):
        for turn in range(FEWEST_MESSAGES, FEWEST_MESSAGES + 3):
            messages = [{"role": "user", "content": f"{conversation} {at} {'x' * 50}"} for at in range(turn)]
            assert template.render(messages) == "".join(message["content"] for message in messages)
            assert 0 < len(template._heads) <= 10_000


def test_what_namespaces_hold_counts() -> None:
    """A template that gathers in one what it writes has its text twice."""
    source = "{% set ns = namespace(a='') %}{% for m in messages %}{% set ns.a = ns.a ~ m.content %}{{ 1 }}{% endfor %}"
    template = ChatTemplate(source, variables={})
    template.render([{"role": "user", "content": "x" * 1000}] * FEWEST_MESSAGES)

    assert len(template._heads) > 1000 * FEWEST_MESSAGES


def test_a_conversation_has_one_entry() -> None:
    """Each turn's takes the place of the last one's: memory goes with a conversation's length, not with its square."""
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", variables={})
    messages = [{"role": "user", "content": "x" * 1000}] * FEWEST_MESSAGES
    for _ in range(30):
        messages = [*messages, {"role": "user", "content": "x" * 1000}]
        template.render(messages)

    assert len(template._heads) < 1.2 * 1000 * len(messages)


def nested(depth: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(depth):
        made = [made]
    return made


@pytest.mark.parametrize("odd", [nested(3000), 2**64, -(2**63) - 1, "\ud800"], ids=["deep", "large", "small", "half"])
def test_what_cannot_be_named_is_rendered_whole(odd: object) -> None:
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", variables={})
    messages = [{"role": "user", "content": "m", "odd": odd}] * FEWEST_MESSAGES

    assert template.render(messages) == "m" * FEWEST_MESSAGES
    assert len(template._heads) == 0


def test_threads_share_it() -> None:
    template = ChatTemplate(RESUMED["state"], variables={})
    conversations = [grown(random.Random(seed), 40) for seed in range(4)]
    wrong = []

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(100):
            messages = rng.choice(conversations)[: rng.randint(1, 40)]
            now, whole = both(template, messages)
            if now != whole:
                wrong.append(messages)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert not wrong
