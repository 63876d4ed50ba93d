"""The nouns of a replay: sessions of turns whose prompts are named block by block.

A prompt is a sequence of blocks of ``block_tokens`` tokens, named by integer ids that are unique within the
session's namespace: equal ids, equal text. What does not fill a block is the *tail*, named by the block
it will grow into. Blocks are held as runs of consecutive ids, since a growing context is nearly always one
or two runs: 100,000 tokens in blocks of 64 are one ``range`` instead of 1,562 integers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

BlockRuns = tuple[range, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation.

    ``blocks`` name the whole blocks of the prompt, ``input_tokens`` counts its tokens, tail included.
    ``gap_seconds`` runs from the end of the turn before, and of the subagents it waits for, to this turn's start.
    ``subagents`` are spawned when this turn has been answered.
    """

    blocks: BlockRuns
    tail_block: int
    input_tokens: int
    output_tokens: int
    gap_seconds: float = 0.0
    subagents: tuple[Subagent, ...] = ()

    @property
    def prompt_blocks(self) -> BlockRuns:
        """All ids that the prompt's text comes from: the whole blocks, then the tail's."""
        return (*self.blocks, range(self.tail_block, self.tail_block + 1))


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns that follow one another; ``head_tokens`` of tools and system prompt begin the first one."""

    turns: tuple[Turn, ...]
    head_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Subagent:
    """A conversation of its own, begun ``delay_seconds`` after its parent's turn.

    The parent's next turn waits for it when ``is_joined``; otherwise it runs in the background.
    """

    agent_id: str
    conversation: Conversation
    delay_seconds: float = 0.0
    is_joined: bool = True


@dataclass(frozen=True, slots=True)
class Session:
    """One play of an agent's run: the main conversation and, inside its turns, the subagents'.

    ``namespace`` divides block ids: the same id in two namespaces is different text. A session that is played
    twice has two ids, and two namespaces unless its blocks are meant to be shared.
    ``start_seconds`` is the arrival in an open-loop trace; None starts as soon as a lane is free.
    """

    session_id: str
    namespace: str
    block_tokens: int
    main: Conversation
    start_seconds: float | None = None


def runs_of(ids: Iterable[int]) -> BlockRuns:
    """Consecutive ids gathered into runs."""
    runs: list[range] = []
    for block in ids:
        if runs and runs[-1].stop == block:
            runs[-1] = range(runs[-1].start, block + 1)
        else:
            runs.append(range(block, block + 1))
    return tuple(runs)


def count_blocks(runs: BlockRuns) -> int:
    return sum(map(len, runs))


def take_blocks(runs: BlockRuns, count: int) -> BlockRuns:
    """The first ``count`` blocks; all of them when there are fewer."""
    kept: list[range] = []
    for run in runs:
        if count <= 0:
            break
        kept.append(run[:count])
        count -= len(run)
    return tuple(kept)


def drop_blocks(runs: BlockRuns, count: int) -> BlockRuns:
    """What follows the first ``count`` blocks."""
    kept: list[range] = []
    for run in runs:
        if len(run) > count:
            kept.append(run[max(0, count) :])
        count -= len(run)
    return tuple(kept)


def common_blocks(left: BlockRuns, right: BlockRuns) -> int:
    """Length of the longest common prefix, in blocks, in time of the number of runs."""
    common = 0
    left_rest, right_rest = list(reversed(left)), list(reversed(right))
    while left_rest and right_rest:
        one, other = left_rest.pop(), right_rest.pop()
        if one.start != other.start:
            break
        shared = min(len(one), len(other))
        common += shared
        if len(one) > shared:
            left_rest.append(one[shared:])
        if len(other) > shared:
            right_rest.append(other[shared:])
    return common


def limit_turns(session: Session, max_turns: int) -> Session:
    """The session with at most ``max_turns`` turns in each of its conversations."""

    def cut(conversation: Conversation) -> Conversation:
        return replace(conversation, turns=tuple(map(cut_children, conversation.turns[:max_turns])))

    def cut_children(turn: Turn) -> Turn:
        return replace(
            turn,
            subagents=tuple(replace(child, conversation=cut(child.conversation)) for child in turn.subagents),
        )

    return replace(session, main=cut(session.main))


def conversations(session: Session) -> Sequence[Conversation]:
    """The main conversation, then each subagent's, in the order of their spawning."""
    found = [session.main]
    for conversation in found:
        found.extend(child.conversation for turn in conversation.turns for child in turn.subagents)
    return found
