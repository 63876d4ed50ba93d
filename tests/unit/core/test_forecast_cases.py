"""Cases that random examples found, each for a rule of its own, against the engines of the oracles of forecasts."""

from __future__ import annotations

from collections.abc import Callable

from tests.unit.core.test_radix_pool_oracle import RadixPoolMachine
from tests.unit.core.test_shared_forecast_oracle import CHUNK, Group, SharedForecastMachine

STATE: Group = ("mamba", 1)


def shared(
    blocks: int, kinds: list[Group], *steps: Callable[[SharedForecastMachine], None], keeps_all: bool = False
) -> None:
    """What is foretold is right after each of these steps of a vLLM."""
    machine = SharedForecastMachine()
    machine.start(blocks=blocks, kinds=kinds, keeps_all=keeps_all)
    for step in steps:
        step(machine)
        machine.found()


def test_the_state_where_a_prompt_ends_is_let_go_of_after_its_chunks() -> None:
    """Those go one step before it, though they are told of together."""
    shared(
        18,
        [("chunked_local_attention", CHUNK), STATE],
        lambda rank: rank.serve(["aaab"]),
        lambda rank: rank.send("ddddd"),
        lambda rank: rank.end(0),
    )


def test_prompts_of_one_step_let_go_of_what_they_have_left_in_turn() -> None:
    """First of what both windows have left, then of both states."""
    shared(
        20,
        [("sliding_window", 1), STATE],
        lambda rank: rank.send("aaa"),
        lambda rank: rank.send("fff"),
        lambda rank: rank.send("f"),
        lambda rank: rank.step(),
        lambda rank: rank.step(),
        lambda rank: rank.deliver(),
        keeps_all=True,
    )


def test_a_promise_outlives_the_event_of_a_longer_prompt() -> None:
    """All of a prompt's dense blocks are told of as part of another one, which keeps no state there: it still will."""
    shared(
        37,
        [STATE],
        lambda rank: rank.send("dde"),
        lambda rank: rank.send("d"),
        lambda rank: rank.step(),
        lambda rank: rank.deliver(),
    )


def test_what_waits_for_state_finds_what_is_computed_meanwhile() -> None:
    """A prompt that would go on from state of this very step comes one step later, when there is more of it."""
    shared(
        12,
        [STATE],
        lambda rank: rank.serve(["f", "aaab", "fff"]),
        lambda rank: rank.send("ddd"),
        lambda rank: rank.end(0),
        lambda rank: rank.send("aaab"),
    )


def test_windows_that_are_kept_are_those_of_when_a_prompt_is_scheduled() -> None:
    """As it was sent two blocks of it were known, and what lies before them was promised; one is left when it comes."""
    shared(
        38,
        [("sliding_window", 1), ("sliding_window", 1)],
        lambda rank: rank.serve(["dde", "aa"]),
        lambda rank: rank.send("a"),
        lambda rank: rank.send("ggggggg"),
        lambda rank: rank.send("ddd"),
    )


def radix(pages: int, *steps: Callable[[RadixPoolMachine], None]) -> None:
    """What is foretold is right after each of these steps of an SGLang."""
    machine = RadixPoolMachine()
    machine.start(pages=pages)
    for step in steps:
        step(machine)
        machine.found()


def test_answers_that_end_together_enter_the_tree_in_the_order_in_which_they_were_sent() -> None:
    """Not in that in which they were heard of: of a prompt that was there no event tells."""
    radix(
        26,
        lambda rank: rank.send([(("aaabbbbb", 1), 1)]),
        lambda rank: rank.send([(("aaaaaaaa", 6), 0), (("aaabbbbb", 1), 1), (("ddeee", 3), 1)]),
        lambda rank: rank.compute(),
        lambda rank: rank.send([(("aaaaaaaa", 1), 2)]),
        lambda rank: rank.compute(),
        lambda rank: rank.send([(("aaabbbbb", 1), 0)]),
        lambda rank: rank.send([(("aaabbccc", 6), 1)]),
        lambda rank: rank.send([(("ddeee", 2), 2), (("aaabbccc", 1), 0)]),
        lambda rank: rank.send([(("ddddd", 4), 0), (("aaabbbbb", 1), 0), (("aaabbbbb", 1), 1)]),
    )


def test_what_was_given_up_and_is_computed_again_is_one_node_with_what_is_behind_it() -> None:
    """The answer to the first prompt goes; it comes back as a part of a longer one, and they go together."""
    radix(
        16,
        lambda rank: rank.send([(("ggggggg", 1), 1)]),
        lambda rank: rank.compute(),
        lambda rank: rank.send([(("aaabbccc", 4), 2)]),
        lambda rank: rank.end_with([1], is_told_before=False),
        lambda rank: rank.send([(("aaaaaaaa", 1), 1), (("fff", 2), 1)]),
        lambda rank: rank.send([(("ggggggg", 4), 0), (("ddeee", 4), 0)]),
    )
