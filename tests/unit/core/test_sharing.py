"""What of a prompt is a head that others share, and what its own past: chains of keys written out by hand."""

from __future__ import annotations

from router.core.chains import Chains
from router.core.runs import Runs
from router.core.sharing import shared_blocks

#: An answer may be as long as 2,048 tokens: four blocks of these.
BLOCK = 512


def chains(*stored: list[int]) -> Chains:
    """Chains that one rank has stored, each from its start."""
    made = Chains(Runs())
    for keys in stored:
        made.extend(0, None, keys)
    return made


def shared(known: Chains, prompt: list[int]) -> int:
    return shared_blocks(known.path(prompt, limit=len(prompt)), block_tokens=BLOCK)


HISTORY = list(range(100))


def test_a_history_that_nobody_goes_on_from_is_its_own() -> None:
    """The next turn continues what is stored, to its end."""
    assert shared(chains(HISTORY), [*HISTORY, 500, 501]) == 0


def test_where_another_conversation_goes_on_the_head_ends() -> None:
    """One other goes another way behind block 40, for ten blocks."""
    other = [*HISTORY[:40], *range(1000, 1010)]
    assert shared(chains(other), [*HISTORY[:40], 500]) == 40
    assert shared(chains(other, HISTORY), [*HISTORY, 500]) == 40
    assert shared(chains(HISTORY, other), [*HISTORY, 500]) == 40


def test_the_last_fork_counts() -> None:
    """Others leave at block 10 and at block 70."""
    others = [[*HISTORY[:at], *range(at * 1000, at * 1000 + 10)] for at in (10, 70)]
    assert shared(chains(HISTORY, *others), [*HISTORY, 500]) == 70
    assert shared(chains(*reversed(others), HISTORY), [*HISTORY, 500]) == 70


def test_an_answer_that_was_left_out_is_no_other_conversation() -> None:
    """Each turn leaves a short branch with what it said; a longer one, or two at one place, are others."""
    answers = [[*HISTORY[:at], *range(at * 1000, at * 1000 + 4)] for at in (50, 70, 100)]
    known = chains(HISTORY, *answers)
    assert shared(known, [*HISTORY, 500]) == 0
    assert shared(chains(*answers, HISTORY), [*HISTORY, 500]) == 0
    assert shared(chains(answers[-1]), [*HISTORY, 500]) == 0
    assert shared(chains(HISTORY, [*HISTORY[:50], *range(1000, 1005)]), [*HISTORY, 500]) == 50
    known.extend(0, None, [*HISTORY[:70], 2000])
    assert shared(known, [*HISTORY, 500]) == 70


def test_who_asks_for_less_than_is_known_has_nothing_of_its_own() -> None:
    """Others go on from its whole prompt."""
    assert shared(chains(HISTORY), HISTORY[:60]) == 60


def test_a_prompt_that_nobody_holds_is_nobodys() -> None:
    """Nothing is known of it."""
    assert shared(chains(HISTORY), [7777]) == 0
