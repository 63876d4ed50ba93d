"""Trace files to sessions: recorded coding-agent sessions, and Mooncake's requests.

Both are JSON lines, plain or gzip. The first line tells which: a session has ``requests``, a Mooncake row has
``input_length``. Damage is a ``TraceError`` that names file, line and cause.
"""

from __future__ import annotations

import gzip
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Final, TypeVar, cast

import msgspec

from loadtest.types import BlockRuns, Conversation, Session, Subagent, Turn, common_blocks, count_blocks, runs_of

MOONCAKE_BLOCK_TOKENS: Final = 512


class GapRule(Enum):
    """What a recorded turn waits for: its ``think_time``, or from the end of the turn before to its start.

    They differ where turns overlapped: a turn that began before the last had ended has no gap from end to start.
    """

    THINK = "think"
    END_TO_START = "end to start"


class TraceError(Exception):
    """A trace cannot be read; the message names file, line and cause."""


Row = Mapping[str, object]
T = TypeVar("T")


def read_trace(path: Path, *, keep_duplicates: bool = False, gaps: GapRule = GapRule.THINK) -> list[Session]:
    """All sessions of a trace file, in the file's order.

    Sessions marked as near-duplicates of another (``dup_of``) are dropped unless ``keep_duplicates``.
    Raises ``TraceError``.
    """
    parse = partial(_claude_code_session, gaps=gaps)
    rows = _rows(path)
    first = next(rows, None)
    if first is None:
        raise TraceError(f"{path}: no session in the file")
    rows = itertools.chain([first], rows)
    if "requests" in first[1]:
        return [_parsed(path, line, parse, row) for line, row in rows if keep_duplicates or not row.get("dup_of")]
    if "input_length" in first[1]:
        return _mooncake_sessions(path, rows)
    raise TraceError(
        f"{path}:1: neither a recorded session (key 'requests') nor a Mooncake request (key 'input_length')"
    )


def choose_sessions(recorded: list[Session], *, count: int, seed: int) -> Iterator[Session]:
    """``count`` plays of recorded sessions, in an order that the seed decides.

    Past the end of the trace the sessions are played again, in a namespace of their own, so that a second
    play finds nothing of the first in any cache. Arrivals (``start_seconds``) keep the trace's order.
    """
    if any(session.start_seconds is not None for session in recorded):
        order = list(recorded)
    else:
        order = random.Random(seed).sample(recorded, len(recorded))
    for number in range(count):
        play, place = divmod(number, len(order))
        session = order[place]
        if play:
            session = replace(
                session,
                session_id=f"{session.session_id}#{play}",
                namespace=f"{session.namespace}#{play}",
                start_seconds=None,
            )
        yield session


# Recorded coding-agent sessions -----------------------------------------------------------------------------


def _claude_code_session(row: Row, *, gaps: GapRule) -> Session:
    session_id = _text(row, "id")
    block_tokens = _whole(row, "block_size", minimum=1)
    return Session(
        session_id=session_id,
        namespace=session_id,  # ids are local to the recording; subagents share their parent's
        block_tokens=block_tokens,
        main=_conversation(row, block_tokens=block_tokens, gaps=gaps),
    )


def _conversation(owner: Row, *, block_tokens: int, gaps: GapRule) -> Conversation:
    """Requests in order, with subagent markers attached to the request they follow.

    A marker's ``t`` is the moment the subagent *ended* (so it is in all 30 of the public file, where
    ``t - duration_ms`` falls within seconds after the parent's answer), and its own requests count from its start.
    """
    entries = _rows_in(owner, "requests")
    turns: list[Turn] = []
    spawned: list[Subagent] = []
    ended_seconds = joined_seconds = 0.0

    def close_turn() -> None:
        if spawned and turns:
            turns[-1] = replace(turns[-1], subagents=tuple(spawned))
            spawned.clear()

    for number, entry in enumerate(entries):
        started_seconds = _number(entry, "t")
        if entry.get("type") == "subagent":
            duration_seconds = _number(entry, "duration_ms") / 1000
            has_next = any(later.get("type") != "subagent" for later in entries[number + 1 :])
            spawned.append(
                Subagent(
                    agent_id=_text(entry, "agent_id"),
                    conversation=_conversation(entry, block_tokens=block_tokens, gaps=gaps),
                    delay_seconds=max(0.0, started_seconds - duration_seconds - ended_seconds) if turns else 0.0,
                    is_joined=has_next and entry.get("status") != "async_launched",
                )
            )
            if spawned[-1].is_joined:
                joined_seconds = max(joined_seconds, started_seconds)
            continue
        if joined_seconds > ended_seconds:
            gap_seconds = max(0.0, started_seconds - joined_seconds)
        elif gaps is GapRule.THINK and "think_time" in entry:
            gap_seconds = max(0.0, _number(entry, "think_time"))
        else:
            gap_seconds = max(0.0, started_seconds - ended_seconds) if turns else 0.0
        close_turn()
        turns.append(_turn(entry, block_tokens=block_tokens, gap_seconds=gap_seconds))
        ended_seconds = started_seconds + (_number(entry, "api_time") if "api_time" in entry else 0.0)
    if not turns:
        raise ValueError("a conversation without a request of its own")
    close_turn()
    head_tokens = _whole(owner, "tool_tokens", minimum=0) + _whole(owner, "system_tokens", minimum=0)
    return Conversation(_with_tails(turns), head_tokens)


def _turn(entry: Row, *, block_tokens: int, gap_seconds: float) -> Turn:
    if "hash_runs" in entry:
        pairs = _integers(entry, "hash_runs")
        if len(pairs) % 2:
            raise ValueError("'hash_runs' must hold pairs of start and length")
        blocks: BlockRuns = tuple(
            range(start, start + length) for start, length in zip(pairs[::2], pairs[1::2], strict=True)
        )
    else:
        blocks = runs_of(_integers(entry, "hash_ids"))
    input_tokens = _whole(entry, "in", minimum=1)
    if count_blocks(blocks) != input_tokens // block_tokens:
        raise ValueError(
            f"{count_blocks(blocks)} blocks of {block_tokens} do not make 'in' {input_tokens}; the tail has no block"
        )
    return Turn(
        blocks=blocks,
        tail_block=0,
        input_tokens=input_tokens,
        output_tokens=_whole(entry, "out", minimum=0),
        gap_seconds=gap_seconds,
    )


def _with_tails(turns: list[Turn]) -> tuple[Turn, ...]:
    """Name each turn's tail after the block that the next turn has in its place, when that one extends it.

    The recording does not hash what fills no block. A tail that is not continued gets an id below zero,
    which no recording uses, so that it is shared with nothing.
    """
    named: list[Turn] = []
    for place, turn in enumerate(turns):
        length = count_blocks(turn.blocks)
        tail_block = -1 - place
        if place + 1 < len(turns):
            following = turns[place + 1].blocks
            if common_blocks(turn.blocks, following) == length < count_blocks(following):
                tail_block = _block_at(following, length)
        named.append(replace(turn, tail_block=tail_block))
    return tuple(named)


def _block_at(runs: BlockRuns, place: int) -> int:
    for run in runs:
        if place < len(run):
            return run[place]
        place -= len(run)
    raise IndexError(place)


# Mooncake ---------------------------------------------------------------------------------------------------


def _mooncake_sessions(path: Path, rows: Iterator[tuple[int, Row]]) -> list[Session]:
    """One session a request; block ids are global, so all share one namespace.

    Timestamps are quantised to some three seconds: the n requests of one timestamp are spread evenly until the
    next one (in the last, as wide as the one before), or the replay would be bursty where the recording was not.
    """
    parsed = [(line, _parsed(path, line, _mooncake_request, row)) for line, row in rows]
    starts = [start for _, (start, _) in parsed]
    for (line, _), start, following in zip(parsed[1:], starts, starts[1:], strict=False):
        if following < start:
            raise TraceError(f"{path}:{line}: 'timestamp' runs backwards")
    sessions: list[Session] = []
    width = 0.0
    for start, bucket in itertools.groupby(parsed, key=lambda item: item[1][0]):
        members = list(bucket)
        done = len(sessions) + len(members)
        width = starts[done] - start if done < len(starts) else width
        sessions.extend(
            Session(
                session_id=f"request-{line}",
                namespace="mooncake",
                block_tokens=MOONCAKE_BLOCK_TOKENS,
                main=Conversation((turn,)),
                start_seconds=start + width * number / len(members),
            )
            for number, (line, (_, turn)) in enumerate(members)
        )
    return sessions


def _mooncake_request(row: Row) -> tuple[float, Turn]:
    input_tokens = _whole(row, "input_length", minimum=1)
    ids = _integers(row, "hash_ids")
    whole, rest = divmod(input_tokens, MOONCAKE_BLOCK_TOKENS)
    if len(ids) != whole + bool(rest):
        raise ValueError(
            f"'hash_ids' has {len(ids)} blocks where 'input_length' {input_tokens} needs {whole + bool(rest)}"
        )
    turn = Turn(
        blocks=runs_of(ids[:whole]),
        tail_block=ids[whole] if rest else -1,
        input_tokens=input_tokens,
        output_tokens=_whole(row, "output_length", minimum=0),
    )
    return _number(row, "timestamp") / 1000, turn


# Rows and fields --------------------------------------------------------------------------------------------


def _rows(path: Path) -> Iterator[tuple[int, Row]]:
    """Line number and JSON object of each line that is not blank."""
    decoder = msgspec.json.Decoder(dict[str, object])
    line = 0
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for line, content in enumerate(lines, start=1):
                if content.strip():
                    yield line, decoder.decode(content)
    except msgspec.MsgspecError as error:
        raise TraceError(f"{path}:{line}: not a JSON object: {error}") from error
    except EOFError as error:
        raise TraceError(f"{path}:{line + 1}: the gzip file ends early") from error
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from error


def _parsed(path: Path, line: int, parse: Callable[[Row], T], row: Row) -> T:
    try:
        return parse(row)
    except ValueError as error:
        raise TraceError(f"{path}:{line}: {error}") from error


def _number(row: Row, key: str) -> float:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"{key!r} must be a number of at least 0, got {value!r}")
    return float(value)


def _whole(row: Row, key: str, *, minimum: int) -> int:
    value = row.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"{key!r} must be a whole number of at least {minimum}, got {value!r}")
    return value


def _text(row: Row, key: str) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not value:
        raise ValueError(f"{key!r} must be a text, got {value!r}")
    return value


def _integers(row: Row, key: str) -> list[int]:
    value = row.get(key)
    if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
        raise ValueError(f"{key!r} must be a list of whole numbers, got {type(value).__name__}")
    return cast("list[int]", value)


def _rows_in(row: Row, key: str) -> list[Row]:
    value = row.get(key)
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError(f"{key!r} must be a list of objects, got {type(value).__name__}")
    return cast("list[Row]", value)
