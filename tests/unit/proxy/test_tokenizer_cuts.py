"""Tokenizers for which a cut at special tokens is not safe: whatever they do, the ids are those of the whole text."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Literal

import pytest
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

from router.proxy.tokenization import PromptTokenizer
from router.wire.chat_template import ChatTemplate
from router.wire.openai import Endpoint, InferenceRequest


def byte_level(*added: AddedToken, normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    """A byte-level tokenizer without merges, but for a few that cross blanks and words."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "ab", "Ġa", "aa"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("a", "b"), ("Ġ", "a"), ("a", "a")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.add_special_tokens([token for token in added if token.special])
    tokenizer.add_tokens([token for token in added if not token.special])
    return tokenizer


def prefix_space() -> Tokenizer:
    tokenizer = byte_level(AddedToken("<s>", special=True, normalized=False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def metaspace(scheme: Literal["always", "never", "first"] = "first") -> Tokenizer:
    vocabulary = {token: number for number, token in enumerate(["<unk>", *"▁<>/s|abx", "▁a", "ab"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("a", "b")], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    return tokenizer


def marked(normalizer: normalizers.Normalizer) -> Tokenizer:
    """As Gemma and Llama mark blanks: by the normalizer."""
    tokenizer = metaspace()
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return tokenizer


S = AddedToken("<s>", special=True, normalized=False)
TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "plain": lambda: byte_level(S),
    "composed": lambda: byte_level(S, normalizer=normalizers.NFC()),
    "strip": lambda: byte_level(S, normalizer=normalizers.Strip()),
    "prefix-space": prefix_space,
    "metaspace": metaspace,
    "two-specials": lambda: byte_level(S, AddedToken("<s><s>", special=True, normalized=False)),
    "greedy-left": lambda: byte_level(S, AddedToken("</s>", special=True, normalized=False, lstrip=True)),
    "greedy-right": lambda: byte_level(S, AddedToken("</s>", special=True, normalized=False, rstrip=True)),
    "longer": lambda: byte_level(S, AddedToken("a<s>", special=False, normalized=False)),
    "overlap-left": lambda: byte_level(S, AddedToken("a<", special=False, normalized=False)),
    "overlap-right": lambda: byte_level(S, AddedToken("s>a", special=False, normalized=False)),
    "word": lambda: byte_level(
        AddedToken("xs", special=True, normalized=False), AddedToken("ba", normalized=False, single_word=True)
    ),
    "gemma": lambda: marked(normalizers.Replace(" ", "▁")),
    "llama": lambda: marked(normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])),
    "metaspace-always": lambda: metaspace("always"),
    "normalized": lambda: byte_level(S, AddedToken("ab", special=False, normalized=True)),
}


SYMBOLS = ("<s>", "</s>", "<", "s>", "a", "b", "ab", " ", "\n", "x", "xs", "/", "e\u0301", "\u0301")


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_every_tokenizer_gets_the_ids_of_the_whole(kind: str) -> None:
    """Where a cut at special tokens would change the ids, there is no cut: all texts of up to three symbols."""
    tokenizer = TOKENIZERS[kind]()
    ours = PromptTokenizer(tokenizer, ChatTemplate("{{ messages[0].content }}", variables={}))
    texts = map("".join, itertools.chain.from_iterable(itertools.product(SYMBOLS, repeat=count) for count in range(4)))

    for text in texts:
        fields = {"messages": [{"role": "user", "content": text}]}
        request = InferenceRequest(Endpoint.CHAT, "m", False, None, fields, b"", chat=fields)
        assert list(ours.encode(request) or ()) == tokenizer.encode(text, add_special_tokens=False).ids, text
