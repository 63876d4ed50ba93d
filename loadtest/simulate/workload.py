"""What is asked: plays of recorded sessions with synthetic subagents, and who shares what with whom.

Every draw comes from a generator named by seed, lane, play (and turn), so that all policies get the same requests.
The parameters of subagents and heads are those of published agent corpora: 44.5 % of sessions have groups of subagents,
LN(4, 1.3) for every 100 turns, of one, two or three, each asking 10 to 25 times from a context of 10,300 tokens.
"""

from __future__ import annotations

import math
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath

from loadtest.simulate.runs import NumberedPath, Path, Run, number_paths
from loadtest.trace import GapRule, TraceError, read_trace
from loadtest.types import BlockRuns, Session, count_blocks, drop_blocks

#: Client versions, drawn by Zipf's law, and the tokens of tools and system prompt that a version's sessions share.
VERSIONS = 8
HEAD_TOKENS = 12_000
MAX_GAP_SECONDS = 300.0
_SUBAGENT_SHARE = 0.445
_SUBAGENT_TYPES = 4
_SUBAGENT_HEAD_TOKENS = 6_400
_SUBAGENT_FIRST_TOKENS = 10_300
_MIN_TURNS = 10
_MAX_SESSION_TOKENS = 600_000


@dataclass(frozen=True, slots=True)
class TurnShape:
    """One recorded request; ``path`` numbers the runs of its session's tree, below the ``head_blocks`` of a version.

    ``gap_seconds`` runs from the end of the turn before.
    """

    path: NumberedPath
    head_blocks: int
    prompt_tokens: int
    output_tokens: int
    gap_seconds: float


@dataclass(frozen=True, slots=True)
class SessionShape:
    """A recorded session, to be played any number of times."""

    name: str
    turns: tuple[TurnShape, ...]
    runs: int


@dataclass(frozen=True, slots=True)
class ChildPlan:
    """One subagent's requests: prompt and reply tokens, and the gap before each but the first."""

    kind: int
    turns: tuple[tuple[int, int, float], ...]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request of an open-loop trace; ``conversation`` names the earlier requests that it continues."""

    at_seconds: float
    conversation: int
    path: NumberedPath
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Recording:
    """A trace: sessions for closed-loop lanes, or arrivals of an open loop over one tree of runs."""

    block_tokens: int
    sessions: tuple[SessionShape, ...] = ()
    arrivals: tuple[Arrival, ...] = ()
    runs: int = 0

    @property
    def span_seconds(self) -> float:
        """From the first arrival to the last."""
        return self.arrivals[-1].at_seconds - self.arrivals[0].at_seconds if self.arrivals else 0.0

    @property
    def least_prompt_tokens(self) -> int:
        """The shortest prompt."""
        turns = [turn.prompt_tokens for session in self.sessions for turn in session.turns]
        return min(turns + [arrival.prompt_tokens for arrival in self.arrivals], default=0)


def load_recording(path: FilePath) -> Recording:
    """Read a trace. Raises ``TraceError``; sessions of fewer than ten turns or over 600,000 tokens are left out."""
    sessions = read_trace(path, gaps=GapRule.END_TO_START)
    block_tokens = sessions[0].block_tokens
    if sessions[0].start_seconds is not None:
        return _open_loop(sessions, block_tokens=block_tokens)
    kept = [
        _shape(session)
        for session in sessions
        if len(session.main.turns) >= _MIN_TURNS
        and max(turn.input_tokens for turn in session.main.turns) <= _MAX_SESSION_TOKENS
    ]
    if not kept:
        raise TraceError(
            f"{path}: no session is simulated: each has fewer than {_MIN_TURNS} turns or a prompt of more than "
            f"{_MAX_SESSION_TOKENS:,} tokens"
        )
    return Recording(block_tokens, sessions=tuple(kept))


def _shape(session: Session) -> SessionShape:
    head_blocks = HEAD_TOKENS // session.block_tokens
    paths, runs = number_paths([drop_blocks(turn.blocks, head_blocks) for turn in session.main.turns])
    turns = tuple(
        TurnShape(
            path=path,
            head_blocks=min(head_blocks, count_blocks(turn.blocks)),
            prompt_tokens=turn.input_tokens,
            output_tokens=max(1, turn.output_tokens),
            gap_seconds=min(MAX_GAP_SECONDS, turn.gap_seconds),
        )
        for turn, path in zip(session.main.turns, paths, strict=True)
    )
    return SessionShape(session.session_id, turns, runs)


def _open_loop(sessions: Sequence[Session], *, block_tokens: int) -> Recording:
    turns = [session.main.turns[0] for session in sessions]
    paths, runs = number_paths([turn.blocks for turn in turns])
    names = _conversations([turn.blocks for turn in turns])
    arrivals = tuple(
        Arrival(
            at_seconds=session.start_seconds or 0.0,
            conversation=name,
            path=path,
            prompt_tokens=turn.input_tokens,
            output_tokens=max(1, turn.output_tokens),
        )
        for session, turn, path, name in zip(sessions, turns, paths, names, strict=True)
    )
    return Recording(block_tokens, arrivals=arrivals, runs=runs)


def _conversations(prompts: Sequence[BlockRuns]) -> list[int]:
    """A name for each prompt: that of the latest earlier prompt which it contains whole, else its own number.

    A prompt of one block is contained by too many to be anybody's beginning.
    """
    ended_by: dict[int, int] = {}
    names: list[int] = []
    for number, runs in enumerate(prompts):
        ids = [block for run in runs for block in run]
        name = next((ended_by[block] for block in reversed(ids[1:]) if block in ended_by), number)
        names.append(name)
        if len(ids) > 1:
            ended_by[ids[-1]] = name
    return names


class Shared:
    """Runs that plays have in common: heads of client versions and of kinds of subagents."""

    def __init__(self) -> None:
        self.versions = [Run() for _ in range(VERSIONS)]
        self.kinds = [Run() for _ in range(_SUBAGENT_TYPES)]


@dataclass(slots=True, eq=False)
class Play:
    """One session being played on a lane: fresh runs, the groups of subagents it will spawn, and its next turn."""

    name: str
    shape: SessionShape
    start: int
    head: Run
    groups: dict[int, list[ChildPlan]]
    runs: defaultdict[int, Run] = field(default_factory=lambda: defaultdict(Run))

    def path(self, turn: int) -> Path:
        """The prompt of a turn, as runs."""
        shape = self.shape.turns[turn]
        return ((self.head, shape.head_blocks), *((self.runs[number], blocks) for number, blocks in shape.path))


def plays(recording: Recording, shared: Shared, *, seed: int, lane: int, lanes: int) -> Iterator[Play]:
    """What a lane plays, without end: the first from 25 to 75 % of its turns, the others from their start.

    Lanes take turns in one shuffled order, so that a recording is played about evenly.
    """
    order = random.Random(seed).sample(recording.sessions, len(recording.sessions))
    number = 0
    while True:
        rng = random.Random(f"{seed}/{lane}/{number}")
        shape = order[(lane + lanes * number) % len(order)]
        version = rng.choices(range(VERSIONS), [1 / (rank + 1) for rank in range(VERSIONS)])[0]
        start = int(len(shape.turns) * rng.uniform(0.25, 0.75)) if number == 0 else 0
        yield Play(
            name=f"{lane}.{number}",
            shape=shape,
            start=start,
            head=shared.versions[version],
            groups=_groups(rng, turns=len(shape.turns)),
        )
        number += 1


def _groups(rng: random.Random, *, turns: int) -> dict[int, list[ChildPlan]]:
    """Subagents spawned at the end of a turn, by turn; never at the last, which nothing follows."""
    groups: dict[int, list[ChildPlan]] = {}
    if rng.random() >= _SUBAGENT_SHARE:
        return groups
    for _ in range(round(rng.lognormvariate(math.log(4), 1.3) * turns / 100)):
        turn = rng.randrange(turns - 1)
        siblings = rng.choices((1, 2, 3), (0.55, 0.24, 0.21))[0]
        kind = rng.randrange(_SUBAGENT_TYPES)
        groups.setdefault(turn, []).extend(_child(rng, kind) for _ in range(siblings))
    return groups


def _child(rng: random.Random, kind: int) -> ChildPlan:
    turns = []
    prompt_tokens, gap_seconds = _SUBAGENT_FIRST_TOKENS, 0.0
    for _ in range(rng.randint(10, 25)):
        output_tokens = int(min(18_000, max(16, rng.lognormvariate(math.log(260), 0.87))))
        turns.append((prompt_tokens, output_tokens, gap_seconds))
        prompt_tokens += output_tokens + int(min(64_000, rng.lognormvariate(math.log(800), 1.15)))
        gap_seconds = min(MAX_GAP_SECONDS, max(2.0, rng.lognormvariate(math.log(9.0), 1.27)))
    return ChildPlan(kind, tuple(turns))


def child_path(head: Run, own: Run, prompt_tokens: int, *, block_tokens: int) -> Path:
    """A subagent's prompt: its kind's head, then its own run."""
    shared = _SUBAGENT_HEAD_TOKENS // block_tokens
    return ((head, shared), (own, prompt_tokens // block_tokens - shared))
