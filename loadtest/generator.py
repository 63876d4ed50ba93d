"""Coding-agent sessions drawn from published statistics, for machines without a recording.

Every draw depends on (seed, session, where, field) alone, so session 17 is the same session whatever the
number of lanes, the order of play, or the turns that are left out. Numbers are fits to 678 recorded Claude Code
sessions (kv-cache-tester) and, for subagents, figures published for the AgentX corpus.
What the result must show (and the tests check): ideal hit rate .93-.97, median request above .99, some 700 uncached
tokens in a median turn, median input about 100,000 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import copy
from dataclasses import dataclass, replace
from math import exp
from statistics import NormalDist
from typing import Final

import xxhash

from loadtest.types import BlockRuns, Conversation, Session, Subagent, Turn, count_blocks, take_blocks

BLOCK_TOKENS: Final = 64
_NAMESPACE: Final = "generated"
_NORMAL: Final = NormalDist()
_ID_SPACE_BITS: Final = 24  # blocks of one owner: 16.7 million, a thousand million tokens


@dataclass(frozen=True, slots=True)
class LogNormal:
    """A lognormal by its median and the deviation of its logarithm, clamped."""

    median: float
    sigma: float
    low: float
    high: float

    def at(self, quantile: float) -> float:
        drawn = self.median * exp(self.sigma * _NORMAL.inv_cdf(quantile))
        return min(max(drawn, self.low), self.high)


@dataclass(frozen=True, slots=True)
class Workload:
    """Parameters of the agent workload; tokens and seconds are unscaled."""

    client_versions: int = 8
    head_tokens: int = 15_040
    user_head_tokens: LogNormal = LogNormal(400, 0.15, 300, 500)
    resumed_share: float = 0.48
    fresh_tokens: LogNormal = LogNormal(19_000, 0.25, 16_000, 40_000)
    resumed_tokens: LogNormal = LogNormal(121_000, 0.8, 40_000, 850_000)
    turns: LogNormal = LogNormal(44, 0.8, 3, 1200)
    user_turn_share: float = 0.144
    user_tokens: LogNormal = LogNormal(240, 1.7, 16, 100_000)
    tool_tokens: LogNormal = LogNormal(310, 1.7, 16, 100_000)
    output_tokens: LogNormal = LogNormal(230, 0.87, 16, 18_000)
    user_gap_seconds: LogNormal = LogNormal(129, 1.72, 2, 100_000)
    tool_gap_seconds: LogNormal = LogNormal(12.6, 1.27, 2, 100_000)
    break_share: float = 0.017
    long_context_share: float = 0.35
    context_limit_tokens: LogNormal = LogNormal(155_000, 0.03, 145_000, 165_000)
    long_limit_tokens: LogNormal = LogNormal(400_000, 0.4, 165_000, 900_000)
    compacted_tokens: LogNormal = LogNormal(33_000, 0.5, 17_000, 90_000)
    summary_tokens: LogNormal = LogNormal(1_700, 0.35, 1_000, 3_000)
    spawning_share: float = 0.445
    subagent_groups: LogNormal = LogNormal(2, 1.1, 1, 60)
    subagent_types: int = 4
    subagent_head_tokens: int = 9_024
    subagent_tokens: LogNormal = LogNormal(10_300, 0.1, 9_200, 14_000)
    subagent_turns: LogNormal = LogNormal(10, 0.4, 3, 40)
    background_share: float = 0.06


AGENT_WORKLOAD: Final = Workload()


def generate_sessions(count: int, *, seed: int, workload: Workload = AGENT_WORKLOAD) -> Iterator[Session]:
    """The first ``count`` sessions of a seed."""
    for number in range(count):
        yield generate_session(number, seed=seed, workload=workload)


def generate_session(number: int, *, seed: int, workload: Workload = AGENT_WORKLOAD) -> Session:
    """Session ``number`` of a seed."""
    draws = _Draws(f"{seed}/{number}")
    client = _zipf(draws("client"), workload.client_versions)
    head = _owned_ids(f"{seed}/client/{client}", workload.head_tokens // BLOCK_TOKENS)
    main = _main_conversation(_Context(head, owner=f"{seed}/{number}"), draws=draws, workload=workload)
    if draws("spawns") < workload.spawning_share:
        main = _with_subagents(main, seed=seed, number=number, client=client, draws=draws, workload=workload)
    return Session(
        session_id=f"session-{number:04d}",
        namespace=_NAMESPACE,
        block_tokens=BLOCK_TOKENS,
        main=main,
    )


def _main_conversation(context: _Context, *, draws: _Draws, workload: Workload) -> Conversation:
    context.append(int(workload.user_head_tokens.at(draws("user head"))))
    head_tokens = context.tokens
    limit_tokens = int(workload.context_limit_tokens.at(draws("limit")))
    is_resumed = draws("resumed") < workload.resumed_share
    opening = workload.resumed_tokens if is_resumed else workload.fresh_tokens
    opening_tokens = int(opening.at(draws("opening")))
    is_long = opening_tokens > 0.9 * limit_tokens or draws("long") < workload.long_context_share
    if is_long:
        limit_tokens = int(workload.long_limit_tokens.at(draws("long limit")))
    context.append(min(opening_tokens, limit_tokens) - context.tokens)

    turns: list[Turn] = []
    branches: list[_Context] = []
    output_tokens = 0
    is_summary = False
    for place in range(int(workload.turns.at(draws("turns")))):
        at = f"turn {place} "
        is_user = draws(at + "kind") < workload.user_turn_share
        gap = workload.user_gap_seconds if is_user else workload.tool_gap_seconds
        added = workload.user_tokens if is_user else workload.tool_tokens
        added_tokens = int(added.at(draws(at + "added")))
        breaks = draws(at + "break") / workload.break_share
        if is_summary:
            context.rewrite(head_tokens, size_tokens=int(workload.compacted_tokens.at(draws(at + "compacted"))))
        elif place and breaks < 0.65:  # something early in the history changed, its size did not
            context.rewrite(head_tokens, size_tokens=context.tokens)
        elif place and breaks < 0.90:  # cleared or compacted by hand
            context.rewrite(head_tokens, size_tokens=int(workload.compacted_tokens.at(draws(at + "compacted"))))
        elif place and breaks < 0.95:  # back to an earlier branch
            context.resume(branches[int(draws(at + "branch") * len(branches))])
            context.append(added_tokens)
        elif place and breaks < 1.0:
            context.rewrite(int(draws(at + "kept") * context.tokens), size_tokens=context.tokens)
        elif place:
            context.append(output_tokens + added_tokens)
        is_summary = context.tokens > limit_tokens
        output = workload.summary_tokens if is_summary else workload.output_tokens
        output_tokens = int(output.at(draws(at + "output")))
        gap_seconds = gap.at(draws(at + "gap")) if place else 0.0
        turns.append(context.turn(output_tokens=output_tokens, gap_seconds=gap_seconds))
        branches.append(context.copy())
    return Conversation(tuple(turns), head_tokens)


def _with_subagents(
    main: Conversation, *, seed: int, number: int, client: int, draws: _Draws, workload: Workload
) -> Conversation:
    """The conversation with groups of subagents spawned at once; those of one type share their head."""
    spawned: dict[int, list[Subagent]] = {}
    groups = min(round(workload.subagent_groups.at(draws("groups"))), len(main.turns))
    for group in range(groups):
        at = f"group {group} "
        place = int(draws(at + "turn") * len(main.turns))
        kind = int(draws(at + "type") * workload.subagent_types)
        is_joined = place + 1 < len(main.turns) and draws(at + "background") >= workload.background_share
        for child in range(_fan_out(draws(at + "fan-out"))):
            agent_id = f"agent-{group:02d}-{child}"
            head = _owned_ids(f"{seed}/client/{client}/agent/{kind}", workload.subagent_head_tokens // BLOCK_TOKENS)
            conversation = _subagent_conversation(
                _Context(head, owner=f"{seed}/{number}/{agent_id}"),
                draws=_Draws(f"{seed}/{number}/{agent_id}"),
                workload=workload,
            )
            spawned.setdefault(place, []).append(Subagent(agent_id, conversation, 0.2 + 0.1 * child, is_joined))
    turns = [replace(turn, subagents=tuple(spawned.get(place, ()))) for place, turn in enumerate(main.turns)]
    return replace(main, turns=tuple(turns))


def _subagent_conversation(context: _Context, *, draws: _Draws, workload: Workload) -> Conversation:
    head_tokens = context.tokens
    context.append(int(workload.subagent_tokens.at(draws("opening"))) - context.tokens)
    turns: list[Turn] = []
    output_tokens = 0
    for place in range(int(workload.subagent_turns.at(draws("turns")))):
        at = f"turn {place} "
        if place:
            context.append(output_tokens + int(workload.tool_tokens.at(draws(at + "added"))))
        output_tokens = int(workload.output_tokens.at(draws(at + "output")))
        gap_seconds = workload.tool_gap_seconds.at(draws(at + "gap")) if place else 0.0
        turns.append(context.turn(output_tokens=output_tokens, gap_seconds=gap_seconds))
    return Conversation(tuple(turns), head_tokens)


def _fan_out(quantile: float) -> int:
    """One, two, or three and more at once in 55, 24 and 21 of 100 cases; ten at most."""
    if quantile < 0.55:
        return 1
    if quantile < 0.79:
        return 2
    return min(10, int(3 / ((1 - quantile) / 0.21) ** 0.4))


class _Context:
    """A prompt under construction: whole blocks, then a tail named by the block it grows into.

    Ids come from ``owner``'s own range and are never used twice, so a rewritten part shares nothing.
    """

    def __init__(self, head: range, *, owner: str) -> None:
        self._blocks: BlockRuns = (head,)
        self._tail_tokens = 0
        self._next_id = _owned_ids(owner, 1).start

    @property
    def tokens(self) -> int:
        return count_blocks(self._blocks) * BLOCK_TOKENS + self._tail_tokens

    def append(self, tokens: int) -> None:
        whole, self._tail_tokens = divmod(self._tail_tokens + max(0, tokens), BLOCK_TOKENS)
        if whole and self._blocks[-1].stop == self._next_id:
            self._blocks = (*self._blocks[:-1], range(self._blocks[-1].start, self._next_id + whole))
        elif whole:
            self._blocks = (*self._blocks, range(self._next_id, self._next_id + whole))
        self._next_id += whole

    def rewrite(self, kept_tokens: int, *, size_tokens: int) -> None:
        """Keep the blocks of the first ``kept_tokens``, and fill up with new ones."""
        self._blocks = take_blocks(self._blocks, kept_tokens // BLOCK_TOKENS)
        self._tail_tokens = 0
        self._next_id += 1  # the old tail's name is used
        self.append(size_tokens - self.tokens)

    def resume(self, earlier: _Context) -> None:
        """Go on from a copy made before; what has come since keeps its names to itself."""
        self._blocks, self._tail_tokens = earlier._blocks, 0
        self._next_id += 1

    def copy(self) -> _Context:
        return copy(self)

    def turn(self, *, output_tokens: int, gap_seconds: float) -> Turn:
        return Turn(self._blocks, self._next_id, self.tokens, output_tokens, gap_seconds)


class _Draws:
    """Uniform draws in (0, 1), each named: a draw is the same whatever was drawn before it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self, field: str) -> float:
        return (xxhash.xxh3_64_intdigest(f"{self._path}/{field}".encode()) + 0.5) / 2.0**64


def _owned_ids(owner: str, count: int) -> range:
    """The first block ids of an owner's range. Ranges overlap by chance once in 2^38 pairs of owners."""
    start = xxhash.xxh3_64_intdigest(owner.encode()) >> _ID_SPACE_BITS << _ID_SPACE_BITS
    return range(start, start + count)


def _zipf(quantile: float, count: int) -> int:
    """A rank of ``count``, with odds 1, 1/2, 1/3 ..."""
    weights = [1 / rank for rank in range(1, count + 1)]
    reached = 0.0
    for rank, weight in enumerate(weights):
        reached += weight / sum(weights)
        if quantile < reached:
            return rank
    return count - 1
