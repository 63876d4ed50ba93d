"""``fastokens`` in place of ``tokenizers``: only where both give the same ids."""

from __future__ import annotations

import sys
from functools import cache
from types import ModuleType, SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.proxy.encoder import Encode, encoder_of
from tests.unit.proxy.test_token_cache import NAMES, TEXT, tokenizer_of, whole


@settings(max_examples=150, deadline=None)
@pytest.mark.parametrize("name", NAMES)
@given(text=TEXT | st.text(max_size=40))
def test_the_faster_encoder_gives_the_same_ids(name: str, text: str) -> None:
    """On adversarial text, for every tokenizer that passed its probes."""
    pytest.importorskip("fastokens")
    assert list(encoders(name)(text)) == whole(tokenizer_of(name), text)


@cache
def encoders(name: str) -> Encode:
    return encoder_of(tokenizer_of(name))


class _Native:
    """What ``fastokens`` offers, with one id wrong."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def from_json_str(self, _: str) -> _Native:
        if self.error is not None:
            raise self.error
        return self

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def encode(self, text: str, *, add_special_tokens: bool) -> SimpleNamespace:
        ids = whole(tokenizer_of("needle"), text)
        return SimpleNamespace(ids=[*ids[:-1], ids[-1] + 1] if "İ" in text else ids)


@pytest.mark.parametrize("error", [None, ValueError("an unknown pre-tokenizer")])
def test_one_that_differs_or_refuses_is_not_used(monkeypatch: pytest.MonkeyPatch, error: Exception | None) -> None:
    """A single wrong id on a probe is enough."""
    module = ModuleType("fastokens")
    module.Tokenizer = _Native(error)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastokens", module)
    encode = encoder_of(tokenizer_of("needle"))

    assert list(encode("İ")) == whole(tokenizer_of("needle"), "İ")


def test_what_it_cannot_encode_tokenizers_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its expressions run out of stack in a megabyte of blanks."""

    class Weak(_Native):
        def encode(self, text: str, *, add_special_tokens: bool) -> SimpleNamespace:
            if len(text) > 2000:
                raise ValueError("Max stack size exceeded for backtracking")
            return SimpleNamespace(ids=whole(tokenizer_of("needle"), text))

        def from_json_str(self, _: str) -> _Native:
            return self

    module = ModuleType("fastokens")
    module.Tokenizer = Weak(None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "fastokens", module)
    text = " " * 3000

    assert list(encoder_of(tokenizer_of("needle"))(text)) == whole(tokenizer_of("needle"), text)


@pytest.mark.parametrize("text", [" " * 1_000_000, "\n" * 1_000_000, "\n " * 500_000])
def test_no_text_is_too_much(text: str) -> None:
    """As it is, on the real one."""
    pytest.importorskip("fastokens")
    assert len(encoders("smollm2")(text)) > 0


def test_without_it_tokenizers_does_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is optional."""
    monkeypatch.setitem(sys.modules, "fastokens", None)

    assert list(encoder_of(tokenizer_of("needle"))("key-0001")) == whole(tokenizer_of("needle"), "key-0001")
