"""Runs against sets of whole prefixes: what a tree says must be what comparing prompts block by block says."""

from __future__ import annotations

import random

from loadtest.simulate.runs import (
    Path,
    Run,
    believed_blocks,
    ever_blocks,
    number_paths,
    path_blocks,
    remember,
    sent_blocks,
)
from loadtest.types import runs_of


def prompts(rng: random.Random, *, count: int) -> list[list[int]]:
    """Prompts that extend, repeat, cut and branch off one another; an id names a block and all before it."""
    made = [[1, 2, 3]]
    fresh = 100
    while len(made) < count:
        kept = rng.choice(made)
        kept = kept[: rng.randint(0, len(kept))]
        grown = rng.randint(0, 5)
        made.append([*kept, *range(fresh, fresh + grown)] or [1])
        fresh += 10
    return made


def paths_of(made: list[list[int]]) -> list[Path]:
    numbered, count = number_paths([runs_of(prompt) for prompt in made])
    runs = [Run() for _ in range(count)]
    return [tuple((runs[number], blocks) for number, blocks in path) for path in numbered]


def common(left: list[int], right: list[int]) -> int:
    return next(
        (place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )


def test_a_growing_prompt_is_one_run() -> None:
    """Nothing branches off, so three turns are three lengths of one run."""
    paths, runs = number_paths([runs_of(range(1, length)) for length in (4, 9, 20)])

    assert runs == 1
    assert paths == [((0, 3),), ((0, 8),), ((0, 19),)]


def test_a_branch_divides_the_run_it_leaves() -> None:
    """The third prompt leaves after two of the first's blocks."""
    paths, runs = number_paths([runs_of(ids) for ids in ([1, 2, 3], [1, 2, 3, 4], [1, 2, 9])])

    assert runs == 3
    assert paths == [((0, 2), (1, 1)), ((0, 2), (1, 2)), ((0, 2), (2, 1))]


def test_matches_are_those_of_comparing_prompts() -> None:
    """Over random trees: the longest beginning seen before, anywhere and by slot, is found exactly."""
    for seed in range(40):
        rng = random.Random(seed)
        made = prompts(rng, count=30)
        seen: list[tuple[int, list[int]]] = []
        for path, prompt in zip(paths_of(made), made, strict=True):
            assert path_blocks(path) == len(prompt)
            by_slot: dict[int, int] = {}
            for slot, earlier in seen:
                by_slot[slot] = max(by_slot.get(slot, 0), common(prompt, earlier))
            expected = {slot: blocks for slot, blocks in by_slot.items() if blocks}
            assert ever_blocks(path) == max(by_slot.values(), default=0)
            assert sent_blocks(path) == expected
            assert believed_blocks(path) == expected
            slot = rng.randrange(3)
            seen.append((slot, prompt))
            remember(path)
            for number, (run, blocks) in enumerate(path):
                run.sent[slot] = max(run.sent.get(slot, 0), blocks)
                if rng.random() < 0.5:
                    run.known[slot] = run.sent[slot]
                run.promised[slot] = (run.sent[slot], number)
