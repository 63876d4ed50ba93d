"""Structured output: whatever a model of random weights says under a grammar, it fits, and drafts change nothing."""

from __future__ import annotations

import asyncio
import json
import random
import re

import jsonschema
import pytest
import torch
from byte_tokenizer import EOS, byte_tokenizer
from parity_rank import ParityRank
from tiny_models import VOCAB, make_tiny_model

from engine_shim.grammar import Grammar, GrammarCompiler, GrammarError, GrammarKind
from engine_shim.model.decoder import Decoder
from engine_shim.model.loading import load_decoder
from engine_shim.model.tokenizer import read_card
from engine_shim.speculative.ngram import NgramDrafter
from engine_shim.types import Constraint, ConstraintError, FinishReason, Request, Sampling

TOKENIZER = byte_tokenizer()
SCHEMAS: list[dict[str, object]] = [
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "age": {"type": "integer", "minimum": 0, "maximum": 130},
            "tags": {"type": "array", "items": {"enum": ["red", "green", 7]}, "minItems": 1, "maxItems": 3},
        },
        "required": ["name", "age", "tags"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {
        "type": "object",
        "properties": {"kind": {"const": "leaf"}, "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/pair"}]}},
        "required": ["kind", "next"],
        "additionalProperties": False,
        "$defs": {"pair": {"type": "array", "prefixItems": [{"type": "null"}, {"type": "boolean"}], "minItems": 2,
                           "maxItems": 2, "items": False}},
    },
    {"type": "string", "pattern": "^[a-f]{2}-[0-9]{1,3}$"},
]  # fmt: skip
REGEXES = [r"[0-9]{4}-(0[1-9]|1[0-2])", r"(yes|no|maybe)( [a-z]{1,5}){0,3}\.", r"[α-ω]{1,4}"]
LARK = 'start: sum\nsum: NUMBER ("+" NUMBER)~0..3\nNUMBER: /[1-9][0-9]{0,2}/\n'
GBNF = 'root ::= item (", " item)? "!"\nitem ::= "a" | "b" [0-9]\n'


def fits(grammar: Grammar, text: str) -> bool:
    """Whether a text is what the grammar says, by the standard library and jsonschema."""
    match grammar:
        case Grammar(GrammarKind.JSON_SCHEMA, schema):
            jsonschema.validate(json.loads(text), json.loads(schema))
            return True
        case Grammar(GrammarKind.REGEX, pattern):
            return re.fullmatch(pattern, text) is not None
        case Grammar(GrammarKind.CHOICE, choices):
            return text in json.loads(choices)
        case Grammar(GrammarKind.GRAMMAR, text_) if text_ == LARK:
            return re.fullmatch(r"[1-9][0-9]{0,2}(\+[1-9][0-9]{0,2}){0,3}", text) is not None
    return re.fullmatch(r"(a|b[0-9])(, (a|b[0-9]))?!", text) is not None


GRAMMARS = [
    *(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)) for schema in SCHEMAS),
    *(Grammar(GrammarKind.REGEX, pattern) for pattern in REGEXES),
    Grammar(GrammarKind.GRAMMAR, LARK),
    Grammar(GrammarKind.GRAMMAR, GBNF),
    Grammar(GrammarKind.CHOICE, json.dumps(["left", "right", 'say "it"'])),
]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    tiny = make_tiny_model("qwen3", tmp_path_factory.mktemp("structured"))
    return load_decoder(read_card(str(tiny.folder)), dtype=torch.float64)


def compiler() -> GrammarCompiler:
    return GrammarCompiler(TOKENIZER, vocab_tokens=VOCAB, eos_token_ids=[EOS])


def constraints(grammars: list[Grammar]) -> list[Constraint]:
    async def compile_all() -> list[Constraint]:
        one = compiler()
        return [await one.compile(grammar) for grammar in grammars]

    return asyncio.run(compile_all())


def answer(rank: ParityRank, *, temperature: float, rounds: int = 1) -> dict[str, Request]:
    """Every grammar, and between them requests without one, all at once."""
    rng = random.Random(4)
    asked = GRAMMARS * rounds
    requests = {}
    for number, (grammar, constraint) in enumerate(zip(asked, constraints(asked), strict=True)):
        prompt = tuple(rng.randrange(3, 259) for _ in range(rng.randrange(1, 24)))
        sampling = Sampling(max_tokens=700, temperature=temperature, seed=number)
        requests[f"{number} {grammar.kind}"] = Request(str(number), prompt, sampling, constraint=constraint)
        requests[f"{number} free"] = Request(f"free {number}", prompt, Sampling(max_tokens=12, seed=number))
    for request in requests.values():
        rank.scheduler.add(request)
    while rank.scheduler.has_work:
        rank.step()
    return requests


def make_rank(decoder: Decoder, *, drafts: int = 0, pool_tokens: int = 2048) -> ParityRank:
    return ParityRank(
        decoder,
        pool_tokens=pool_tokens,
        max_running=12,
        eos_token_ids=frozenset({EOS}),
        record=False,
        drafter=NgramDrafter() if drafts else None,
        draft_tokens=drafts,
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_answer_fits(decoder: Decoder, temperature: float) -> None:
    """JSON schemas, regular expressions, two grammar notations and choices; drafts and preemptions change no token."""
    rounds = 2 if temperature else 1
    plain = answer(make_rank(decoder), temperature=temperature, rounds=rounds)
    for number, grammar in enumerate(GRAMMARS * rounds):
        request = plain[f"{number} {grammar.kind}"]
        assert request.finish is FinishReason.STOP, TOKENIZER.decode(request.output)
        assert fits(grammar, TOKENIZER.decode(request.output[:-1]))
    tight = make_rank(decoder, drafts=4, pool_tokens=160)
    drafted = answer(tight, temperature=temperature, rounds=rounds)
    assert {name: request.output for name, request in drafted.items()} == {
        name: request.output for name, request in plain.items()
    }
    stats = tight.scheduler.stats()
    assert temperature or stats.preemptions > 0
    assert sum(stats.accepted_tokens) > 0
    if temperature:
        texts = {TOKENIZER.decode(plain[f"{n} regex"].output) for n in range(len(plain)) if f"{n} regex" in plain}
        assert len(texts) > len(REGEXES), "random answers to one grammar differ"


def test_without_the_mask_nothing_fits(decoder: Decoder) -> None:
    """The test above can fail: the same requests, free, say nothing that fits."""
    rank = make_rank(decoder)
    requests = rank.generate({str(n): [5 + n] for n in range(4)}, sampling=Sampling(60, temperature=1.0))
    for request in requests.values():
        with pytest.raises((ValueError, jsonschema.ValidationError)):
            fits(GRAMMARS[0], TOKENIZER.decode(request.output))


async def test_one_compilation_serves_all_who_ask() -> None:
    """Requests at once and later share a compilation, in a thread; each has a constraint of its own."""
    one = compiler()
    calls: list[Grammar] = []
    compile_ = one._matcher

    def counted(grammar: Grammar) -> object:
        calls.append(grammar)
        with pytest.raises(RuntimeError, match="no running event loop"):
            asyncio.get_running_loop()
        return compile_(grammar)

    one._matcher = counted  # type: ignore[method-assign]
    grammar = Grammar(GrammarKind.REGEX, "[ab]c")
    first, second = await asyncio.gather(one.compile(grammar), one.compile(grammar))
    third = await one.compile(grammar)
    assert calls == [grammar]
    a = TOKENIZER.token_to_id("a")
    before = second.masks([], [])
    assert first.masks([a], []) != before
    assert third.masks([], []) == before


def test_drafts_are_cut_where_they_leave_the_grammar() -> None:
    """Of proposed tokens those up to the first that may not come, or that would end the answer, are tried."""
    (constraint,) = constraints([Grammar(GrammarKind.REGEX, "abc?")])
    a, b, c = (TOKENIZER.token_to_id(letter) for letter in "abc")
    assert constraint.fitting([], [a, b, c, a]) == 3
    assert constraint.fitting([a], [c]) == 0
    assert constraint.fitting([a], [b, EOS]) == 1
    masks = constraint.masks([a], [b, c])
    allowed = [{token for token in range(VOCAB) if mask[token // 8] >> token % 8 & 1} for mask in masks]
    assert allowed == [{b}, {c, EOS}, {EOS}]
    assert constraint.masks([a], []) == masks[:1], "drafts leave no trace"


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type":"strin"}'), "strin"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"if":{"const":1}}'), "if"),
        (Grammar(GrammarKind.JSON_SCHEMA, "{"), "EOF"),
        (Grammar(GrammarKind.REGEX, "(a"), "unclosed group"),
        (Grammar(GrammarKind.GRAMMAR, "start: ("), "Expected"),
        (Grammar(GrammarKind.GRAMMAR, "[0-9"), "Expected name"),
        (Grammar(GrammarKind.GRAMMAR, "root ::= root"), "no answer can fit it"),
        (Grammar(GrammarKind.GRAMMAR, "start: a\na: b\nb: a"), "no answer can fit it"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"$ref":"#"}'), "no answer can fit it"),
        (Grammar(GrammarKind.REGEX, "[^\\s\\S]"), "no answer can fit it"),
    ],
)
async def test_a_bad_grammar_is_told_with_its_fault(grammar: Grammar, reason: str) -> None:
    """And is not kept."""
    one = compiler()
    with pytest.raises(GrammarError, match=re.escape(reason)):
        await one.compile(grammar)
    assert not one._compiled


def test_a_request_whose_grammar_fails_ends_alone(decoder: Decoder) -> None:
    """A grammar that outgrows its limits on the way is its own request's error; the batch goes on."""

    class Failing:
        def fitting(self, output: list[int], drafts: list[int]) -> int:
            return len(drafts)

        def masks(self, output: list[int], drafts: list[int]) -> list[bytes]:
            if len(output) == 3:
                raise ConstraintError("too many states")
            return [b"\xff" * 40] * (1 + len(drafts))

    rank = make_rank(decoder)
    stuck = Request("stuck", (5, 6), Sampling(9, ignore_eos=True), constraint=Failing())
    free = Request("free", (5, 7), Sampling(9, ignore_eos=True))
    for request in (stuck, free):
        rank.scheduler.add(request)
    while rank.scheduler.has_work:
        rank.step()
    assert (stuck.finish, len(stuck.output)) == (FinishReason.ERROR, 3)
    assert (free.finish, len(free.output)) == (FinishReason.LENGTH, 9)
