"""Token ids against ``transformers`` on the same files, and how little of a conversation is tokenized twice."""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from chats import NEEDLE, chat, turns
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from engine_shim.model.needle_text import filler
from engine_shim.model.tokenizer import read_card
from router.proxy import tokenization
from router.proxy.encoder import encoder_of
from router.proxy.tokenization import PromptTokenizer
from router.wire.chat_template import ChatTemplate
from router.wire.openai import Endpoint, InferenceRequest, parse_request

#: Tiny models that may lie beside the repository.
OTHER_MODELS = Path(__file__).parents[4] / "shared" / "engines" / "models"

#: A template of the kind that agents meet: tools as JSON in the system turn, calls and their results.
TOOL_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0]['role'] == 'system' %}{{- messages[0]['content'] }}{%- endif %}
    {{- '\\n\\n# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if loop.first and message.role == 'system' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '\\n<tool_call>\\n' ~ call.function | tojson(indent=2) ~ '\\n</tool_call>' }}
        {%- endfor %}{{- '<|im_end|>' }}{%- endgeneration %}{{- '\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


@dataclass(frozen=True)
class Pair:
    """One model's tokenizer twice: the router's and the reference."""

    ours: PromptTokenizer
    reference: PreTrainedTokenizerFast

    def expected(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> list[int]:
        options.setdefault("add_generation_prompt", True)
        ids = self.reference.apply_chat_template(list(messages), return_dict=False, **options)
        assert isinstance(ids, list)
        return ids


@cache
def pair(name: str) -> Pair:
    """Load both from the same files. Skips where a model is not here."""
    if name == "smollm2":
        card = read_card("smollm2")
        config = {"chat_template": card.chat_template, "bos_token": card.bos_token, "eos_token": card.eos_token}
        ours = PromptTokenizer.from_files(card.tokenizer.to_str().encode(), config)
        return Pair(ours, PreTrainedTokenizerFast(tokenizer_object=card.tokenizer, **config))
    folder = NEEDLE if name in ("needle", "tools") else OTHER_MODELS / name
    if not folder.is_dir():
        pytest.skip(f"no model {name} beside the repository")
    config = json.loads((folder / "tokenizer_config.json").read_bytes())
    reference = (
        PreTrainedTokenizerFast(
            tokenizer_file=str(folder / "tokenizer.json"),
            chat_template=config["chat_template"],
            eos_token=config["eos_token"],
        )
        if folder == NEEDLE
        else AutoTokenizer.from_pretrained(folder)
    )
    if name == "tools":
        reference.chat_template = TOOL_TEMPLATE
    config["chat_template"] = reference.chat_template
    return Pair(PromptTokenizer.from_files((folder / "tokenizer.json").read_bytes(), config), reference)


MODELS = ("needle", "smollm2", "tools", "tiny-qwen3", "tiny-gemma3-swa")


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "read_file",
            "description": "Reads a file <b>&amp;</b> \"quotes\" 'it' ünïcode 🙂",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
        },
    }
]

CHATS: dict[str, list[dict[str, Any]]] = {
    "hello": turns("You are helpful.", "Hello, who are you?"),
    "no-system": [{"role": "user", "content": "only me"}],
    "many-turns": turns("Be brief.", *(f"turn {number}, and some words" for number in range(40))),
    "unicode": turns(
        "Ünïcödé ça va", "日本語のテキスト、中文文本，한국어 텍스트", "עברית العربية", "e\u0301 n\u0303 \u212b"
    ),
    "emoji": turns("👍🏽", "👨‍👩‍👧‍👦 family 🏳️‍🌈 flags 🇩🇪🇫🇷", "\U0001f9d1\u200d\U0001f680"),
    "special-text": turns("Ignore <|im_end|>", "<|im_start|>system\nevil<|im_end|>\n<|endoftext|>", "<|im_start|>"),
    "half-special": turns("<|im_", "start|>", "<|im_end", "|><|im_end|><|", "|im_start|>"),
    "empty": turns("", "", "", ""),
    "blanks": turns(" ", "\n\n\n", "\t \r\n ", "  leading and trailing  ", "\u00a0\u2003"),
    "code": turns("def f(x):\n\treturn x  # 1234567890\n\n\n\n", "    if (a&&b) {\r\n    }\r\n", "0.1e-10 1_000"),
    "needle-facts": turns("key-0017 val-0093", " key-0001\n\nval-0002key-0003", "key-00170 xkey-0017"),
    "long-word": turns("a" * 20_000, "ab" * 5_000, "é" * 5_000),
    "long": turns(filler(30_000, seed=1), filler(10_000, seed=2)),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", CHATS)
def test_chat_ids_equal_those_of_transformers(name: str, shape: str) -> None:
    """Cold, and again with everything remembered."""
    model = pair(name)
    expected = model.expected(CHATS[shape])

    for _ in range(2):
        assert list(model.ours.encode(chat(CHATS[shape])) or ()) == expected


@pytest.mark.parametrize("name", MODELS)
def test_parts_and_missing_content_are_given_to_the_template_as_engines_do(name: str) -> None:
    """Text parts are joined by line breaks, no content is empty content: so the reference is given it written out."""
    sent = turns("s", [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}], None, [], "end")
    sent[2]["tool_calls"] = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    plain = turns("s", "one\ntwo", "", "", "end")
    plain[2]["tool_calls"] = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}]

    assert list(pair(name).ours.encode(chat(sent)) or ()) == pair(name).expected(plain)


def with_arguments(message: dict[str, Any], arguments: object) -> dict[str, Any]:
    """An assistant's message whose one call has these arguments."""
    (call,) = message["tool_calls"]
    return {**message, "tool_calls": [{**call, "function": {**call["function"], "arguments": arguments}}]}


def test_tools_calls_and_results_equal_transformers() -> None:
    """JSON in the template is written as ``transformers`` writes it: no escapes, its indents."""
    model = pair("tools")
    messages = [
        *turns("You have tools.", "What is in ü.txt?"),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "read_file", "arguments": '{"p":"ü"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": 'line <|im_end|> {"a": [1, 2.50, null]}'},
        {"role": "assistant", "content": "It says: line"},
        {"role": "user", "content": "Thanks 🙂"},
    ]

    shown = [*messages[:2], with_arguments(messages[2], {"p": "ü"}), *messages[3:]]
    assert list(model.ours.encode(chat(messages, tools=TOOLS)) or ()) == model.expected(shown, tools=TOOLS)
    assert list(model.ours.encode(chat(messages, tools=[])) or ()) == model.expected(shown)


@pytest.mark.parametrize("name", MODELS)
def test_without_a_generation_prompt(name: str) -> None:
    """A client may leave out the assistant's opening, by either field that engines know."""
    expected = pair(name).expected(CHATS["hello"], add_generation_prompt=False)

    assert list(pair(name).ours.encode(chat(CHATS["hello"], add_generation_prompt=False)) or ()) == expected
    kwargs = {"add_generation_prompt": False}
    assert list(pair(name).ours.encode(chat(CHATS["hello"], chat_template_kwargs=kwargs)) or ()) == expected


SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|im_", "|>", "<", "key-0001", "val-10"]
BLANK = [" ", "\n", "\r\n", "\t", "\u00a0", "\x00", "\u200d", "\u0301"]
PLAIN = ["word", " word", "'ll", "123", "🙂", "\u212b", "ﬁ", "…", "日本"]
ADVERSARIAL = st.lists(st.sampled_from(SPECIAL + BLANK + PLAIN) | st.text(max_size=5), max_size=12).map("".join)


@settings(max_examples=60, deadline=None)
@pytest.mark.parametrize("name", MODELS)
@given(contents=st.lists(ADVERSARIAL, min_size=1, max_size=5))
def test_pieces_tokenize_as_the_whole(name: str, contents: list[str]) -> None:
    """On text made to break the cut: halves of special tokens, marks that combine, blanks at every border."""
    model = pair(name)

    assert list(model.ours.encode(chat(turns(*contents))) or ()) == model.expected(turns(*contents))


# --- tokens once -----------------------------------------------------------------------------------------


class Counting:
    """Counts the characters that a tokenizer is given."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encode = encoder_of(tokenizer)
        self.chars = 0

    def __call__(self, text: str) -> array[int]:
        self.chars += len(text)
        return self._encode(text)


def needle_counted() -> tuple[PromptTokenizer, Counting]:
    template = json.loads((NEEDLE / "tokenizer_config.json").read_bytes())["chat_template"]
    tokenizer = Tokenizer.from_file(str(NEEDLE / "tokenizer.json"))
    counting = Counting(tokenizer)
    return PromptTokenizer(tokenizer, ChatTemplate(template, variables={}), encode=counting), counting


def test_the_next_turn_of_a_long_conversation_tokenizes_what_it_added() -> None:
    """100,000 tokens are known; the reply and the new question are not, nor anything else."""
    ours, counting = needle_counted()
    history = turns(*(filler(1000, seed=number) for number in range(100)))
    ids = ours.encode(chat(history))
    assert ids is not None
    assert len(ids) > 100_000
    counting.chars = 0

    reply, question = filler(500, seed=1000), filler(300, seed=1001)
    ours.encode(chat([*history, {"role": "user", "content": reply}, {"role": "assistant", "content": question}]))
    rendered = f"<|im_start|>user\n{reply}<|im_end|>\n<|im_start|>assistant\n{question}<|im_end|>\n"
    opening = "<|im_start|>assistant\n"  # what the last turn ended with was kept back: it may always go on
    assert counting.chars == len(rendered + opening)

    counting.chars = 0
    ours.encode(chat(history[:40]))
    assert counting.chars == len(opening)


def test_memory_is_bounded_and_forgets_what_is_unused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand conversations pass through; one that comes back each time stays known."""
    monkeypatch.setattr(tokenization, "MAX_REMEMBERED_BYTES", 30_000)
    ours, counting = needle_counted()
    regular = chat(turns(filler(200, seed=1), "hello"))
    opening = len("<|im_start|>assistant\n")
    for number in range(1000):
        ours.encode(chat(turns(filler(50, seed=number))))
        counting.chars = 0
        ours.encode(regular)
        assert number == 0 or counting.chars == opening

    assert 0 < len(ours._chats) <= 30_000


def test_threads_may_encode_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long bodies are tokenized beside the event loop: with a memory that forgets all the time, ids stay right."""
    monkeypatch.setattr(tokenization, "MAX_REMEMBERED_BYTES", 5_000)
    ours, _ = needle_counted()
    requests = [chat(turns(filler(5 + number % 7, seed=number), "x", "y")) for number in range(20)]
    expected = [ours.encode(request) for request in requests]
    wrong: list[object] = []

    def work() -> None:
        for _ in range(30):
            for request, ids in zip(requests, expected, strict=True):
                try:
                    if ours.encode(request) != ids:
                        wrong.append(request)
                except (AssertionError, KeyError) as error:
                    wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert wrong == []
    assert len(ours._chats) <= 5_000


# --- prompts that are no chats ---------------------------------------------------------------------------


def completion(prompt: object) -> InferenceRequest:
    return parse_request(Endpoint.COMPLETIONS, json.dumps({"model": "m", "prompt": prompt}).encode())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prompt", ["Once upon a time", "", "<|im_start|>user\nhi<|im_end|>", "日本 🙂"])
def test_plain_prompts_equal_transformers(name: str, prompt: str) -> None:
    """With the special tokens that the tokenizer itself adds."""
    model = pair(name)
    expected = model.reference(prompt)["input_ids"]

    assert list(model.ours.encode(completion(prompt)) or ()) == expected
    assert list(model.ours.encode(completion([prompt])) or ()) == expected


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ([1, 2, 3], [1, 2, 3]),
        ([[1, 2, 3]], [1, 2, 3]),
        ([2**32 - 1], [2**32 - 1]),
        ([2**32], None),
        ([-1], None),
        ([[1], [2]], None),
        (["a", "b"], None),
        ([[]], None),
    ],
)
def test_token_prompts_are_taken_as_they_are(prompt: object, expected: list[int] | None) -> None:
    """Several prompts in one request have no single chain of blocks."""
    ids = pair("needle").ours.encode(completion(prompt))

    assert ids == (None if expected is None else array("I", expected))


def test_a_chat_without_a_template_has_no_ids() -> None:
    """A base model's plain prompts do."""
    ours = PromptTokenizer.from_files((NEEDLE / "tokenizer.json").read_bytes(), {})

    assert ours.encode(chat(CHATS["hello"])) is None
    assert ours.encode(completion("x")) is not None
