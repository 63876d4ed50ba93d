"""Block ids become messages: shared blocks are shared text, and turns extend one another."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from itertools import chain, pairwise

from hypothesis import given
from hypothesis import strategies as st

from loadtest.text import Message, Script, TextScale, block_words
from loadtest.types import Conversation, Turn, runs_of
from loadtest.words import WORDS

BLOCK_TOKENS = 64
SCALES = st.sampled_from(
    [Fraction(1), Fraction(1, 3), Fraction(1, 16), Fraction(1, 32), Fraction(1, 48), Fraction(1, 100)]
)


def script_of(turns: list[Turn], scale: Fraction, head_tokens: int = 0) -> Script:
    return Script(
        Conversation(tuple(turns), head_tokens),
        namespace="test",
        scale=TextScale(BLOCK_TOKENS, scale),
        vocabulary=WORDS,
    )


def words_of(messages: tuple[Message, ...]) -> list[str]:
    return [word for message in messages for word in message.content.split()]


def ids_of(turn: Turn) -> list[int]:
    return list(chain.from_iterable(turn.prompt_blocks))


@st.composite
def contexts(draw: st.DrawFn) -> list[Turn]:
    """Turns that grow, and now and then go back to an earlier length and differ from there."""
    ids: list[int] = []
    tail_tokens = 0
    unused = 0
    turns: list[Turn] = []
    for _ in range(draw(st.integers(1, 8))):
        if ids and draw(st.integers(0, 3)) == 0:
            ids = ids[: draw(st.integers(0, len(ids)))]
            tail_tokens = 0
            unused += 1
        total = tail_tokens + draw(st.integers(1, 700))
        ids = ids + list(range(unused, unused + total // BLOCK_TOKENS))
        unused += total // BLOCK_TOKENS
        tail_tokens = total % BLOCK_TOKENS
        input_tokens = len(ids) * BLOCK_TOKENS + tail_tokens
        turns.append(Turn(runs_of(ids), unused, input_tokens, draw(st.integers(0, 300))))
    return turns


@given(contexts(), SCALES, st.integers(0, 400))
def test_a_prompt_has_the_words_of_its_blocks_in_order(turns: list[Turn], scale: Fraction, head_tokens: int) -> None:
    """Cut into messages or not, the words are those of the blocks, each beginning at ceil(place * 64 * scale)."""
    script = script_of(turns, scale, head_tokens)
    for turn in turns:
        words = words_of(script.messages(turn))
        assert len(words) == max(2, -(-turn.input_tokens * scale.numerator // scale.denominator))
        ids = ids_of(turn)
        starts = [-(-place * BLOCK_TOKENS * scale.numerator // scale.denominator) for place in range(len(ids))]
        for block, start, end in zip(ids, starts, [*starts[1:], len(words)], strict=True):
            expected = block_words("test", block, count=max(0, end - start), vocabulary=WORDS)
            assert words[start:end] == expected


@given(contexts(), SCALES, st.integers(0, 400))
def test_roles_alternate_and_the_user_has_the_last_word(turns: list[Turn], scale: Fraction, head_tokens: int) -> None:
    """At most one system message, at the head; then user, assistant, user ...; no message is empty."""
    script = script_of(turns, scale, head_tokens)
    for turn in turns:
        messages = script.messages(turn)
        roles = [message.role for message in messages]
        if roles[0] == "system":
            assert head_tokens > 0
            roles = roles[1:]
        assert roles[0] == roles[-1] == "user"
        assert set(roles) <= {"user", "assistant"}
        assert all(one != other for one, other in pairwise(roles))
        assert all(message.content.startswith(" ") and message.content.split() for message in messages)


@given(contexts(), SCALES, st.integers(0, 400))
def test_a_turn_that_extends_another_keeps_all_its_messages(
    turns: list[Turn], scale: Fraction, head_tokens: int
) -> None:
    """With the blocks of the turn before at its head and two more words, a turn adds an answer and a question."""
    script = script_of(turns, scale, head_tokens)
    said = [script.messages(turn) for turn in turns]
    for (earlier, later), (before, after) in zip(pairwise(turns), pairwise(said), strict=True):
        is_extension = ids_of(later)[: len(ids_of(earlier))] == ids_of(earlier)
        is_filled_up = earlier.input_tokens * scale <= 1  # to the two words that any prompt has
        if is_extension and not is_filled_up and len(words_of(after)) >= len(words_of(before)) + 2:
            assert after[: len(before)] == before
            assert [message.role for message in after[len(before) :]] == ["assistant", "user"]
            recorded = max(1, -(-earlier.output_tokens * scale.numerator // scale.denominator))
            fresh = len(words_of(after)) - len(words_of(before))
            assert len(after[-2].content.split()) == min(recorded, fresh - 1)


@given(contexts(), SCALES, st.integers(0, 400))
def test_a_break_keeps_all_that_is_shared(turns: list[Turn], scale: Fraction, head_tokens: int) -> None:
    """A prompt that differs from its closest predecessor in a word is laid out like it up to that word."""
    script = script_of(turns, scale, head_tokens)
    said: list[list[str]] = []
    for turn in turns:
        messages = script.messages(turn)
        laid_out = [f"{place}:{word}" for place, m in enumerate(messages) for word in m.content.split()]
        words = words_of(messages)
        shared = [
            next(
                (n for n, (a, b) in enumerate(zip(words, [w.partition(":")[2] for w in old], strict=False)) if a != b),
                None,
            )
            for old in said
        ]
        if said and all(length is not None for length in shared):
            best = max(length for length in shared if length is not None)
            kept = max(
                next((n for n, (a, b) in enumerate(zip(laid_out, old, strict=False)) if a != b), 0) for old in said
            )
            assert kept >= best
        said.append(laid_out)


def test_the_same_block_reads_the_same_in_any_session_of_a_namespace() -> None:
    """Words follow from namespace and id alone, and another namespace has other words."""
    one = block_words("shared", 7, count=64, vocabulary=WORDS)
    assert one == block_words("shared", 7, count=64, vocabulary=WORDS)
    assert one[:9] == block_words("shared", 7, count=9, vocabulary=WORDS)
    assert one != block_words("other", 7, count=64, vocabulary=WORDS)
    assert one != block_words("shared", 8, count=64, vocabulary=WORDS)


def test_words_are_drawn_evenly_from_the_whole_vocabulary() -> None:
    """1,000 blocks of 64 words use all 1,024 words, none more than twice its share of 62.5."""
    drawn = [word for block in range(1000) for word in block_words("n", block, count=64, vocabulary=WORDS)]
    counts = Counter(drawn)
    assert set(counts) == set(WORDS)
    assert min(counts.values()) > 30
    assert max(counts.values()) < 125


def test_the_head_is_the_system_message_in_every_turn() -> None:
    """128 tokens of tools and system at 1/2 are 64 words of system message, unchanged through a break behind it."""
    turns = [
        Turn((range(4),), 4, 256 + 10, 20),
        Turn((range(2), range(50, 60)), 60, 768, 20),
    ]
    script = script_of(turns, Fraction(1, 2), head_tokens=128)
    first, second = (script.messages(turn) for turn in turns)
    assert first[0].role == "system"
    assert len(first[0].content.split()) == 64
    assert first[0] == second[0]
    assert first[1] != second[1]


def test_a_return_to_an_earlier_branch_continues_its_messages() -> None:
    """A third turn that extends the first, not the second, keeps the first's messages."""
    turns = [
        Turn((range(4),), 4, 256, 64),
        Turn((range(2), range(50, 54)), 54, 384, 64),
        Turn((range(4), range(80, 84)), 84, 512, 64),
    ]
    script = script_of(turns, Fraction(1, 2))
    first, _, third = (script.messages(turn) for turn in turns)
    assert third[: len(first)] == first
    assert len(third) == len(first) + 2
