"""Generated sessions have the statistics of recorded ones, and each is a function of its number alone."""

from __future__ import annotations

import statistics
from dataclasses import replace
from fractions import Fraction
from functools import cache

import pytest

from loadtest.generator import AGENT_WORKLOAD, LogNormal, generate_session, generate_sessions
from loadtest.ideal import IdealCache
from loadtest.text import Script, TextScale
from loadtest.types import BlockRuns, Session, conversations, count_blocks, limit_turns
from loadtest.words import WORDS

SESSIONS = 80


@cache
def sessions() -> tuple[Session, ...]:
    return tuple(generate_sessions(SESSIONS, seed=11))


@cache
def uncached_tokens() -> tuple[tuple[bool, int, int], ...]:
    """(is a session's first turn, input tokens, uncached tokens) of each main turn, by a set of block prefixes.

    Block ids of two owners never coincide, so a prefix is named by its last block and length.
    """
    seen: set[tuple[int, int]] = set()
    found = []
    for session in sessions():
        for place, turn in enumerate(session.main.turns):
            shared, is_shared, position = 0, True, 0
            for run in turn.blocks:
                for block in run:
                    is_shared = is_shared and (block, position) in seen
                    shared += is_shared
                    seen.add((block, position))
                    position += 1
            found.append((place == 0, turn.input_tokens, turn.input_tokens - 64 * shared))
    return tuple(found)


def test_a_session_depends_on_seed_and_number_alone() -> None:
    """Whatever was generated before it, session 7 is session 7; another seed has another."""
    alone = generate_session(7, seed=11)
    assert alone == sessions()[7]
    assert alone != generate_session(7, seed=12)


def test_ideal_hit_rate_of_main_turns() -> None:
    """.93 to .97 token-weighted, the median turn above .99 but for rounding, some 700 uncached tokens in it."""
    turns = uncached_tokens()
    assert 0.93 < 1 - sum(u for _, _, u in turns) / sum(n for _, n, _ in turns) < 0.97
    later = [(n, u) for is_first, n, u in turns if not is_first]
    assert statistics.median(1 - u / n for n, u in later) > 0.989
    assert 600 < statistics.median(u for _, u in later) < 850


def test_first_turns_have_their_share_of_the_misses() -> None:
    """25 to 36 % of all uncached tokens are in the sessions' first turns."""
    turns = uncached_tokens()
    share = sum(u for is_first, _, u in turns if is_first) / sum(u for _, _, u in turns)
    assert 0.25 < share < 0.36


def test_sizes_are_those_of_recorded_sessions() -> None:
    """Median input near 100,000, output near 220, 44 turns a session."""
    turns = [turn for session in sessions() for turn in session.main.turns]
    assert 70_000 < statistics.median(turn.input_tokens for turn in turns) < 115_000
    assert 190 < statistics.median(turn.output_tokens for turn in turns) < 260
    assert 35 < statistics.median(len(session.main.turns) for session in sessions()) < 55


def test_turns_are_well_formed() -> None:
    """Whole blocks fill the prompt but for the tail, and the tail's name is the next block's if it goes on."""
    for session in sessions()[:40]:
        for conversation in conversations(session):
            for turn in conversation.turns:
                assert count_blocks(turn.blocks) == turn.input_tokens // 64
            assert conversation.turns[0].gap_seconds == 0.0
            assert 0 < conversation.head_tokens < conversation.turns[0].input_tokens


def test_clients_of_one_version_share_their_head_and_nothing_else() -> None:
    """At most eight heads among the sessions; behind the head no block is in two sessions."""
    heads = {session.main.turns[0].blocks[0].start for session in sessions()}
    assert 2 <= len(heads) <= AGENT_WORKLOAD.client_versions
    owners: dict[int, str] = {}
    for session in sessions():
        private = {run.start for turn in session.main.turns for run in turn.blocks[1:]}
        for start in private:
            assert owners.setdefault(start, session.session_id) == session.session_id


def test_subagents_are_as_common_as_published() -> None:
    """44.5 % of sessions spawn, give or take the sample; siblings of one type begin with one head."""
    spawning = sum(any(turn.subagents for turn in session.main.turns) for session in sessions())
    assert 0.445 - 0.17 < spawning / SESSIONS < 0.445 + 0.17  # three standard deviations of 80 draws
    groups: dict[tuple[str, str], list[BlockRuns]] = {}
    for session in sessions():
        for child in (child for turn in session.main.turns for child in turn.subagents):
            group = child.agent_id.rpartition("-")[0]
            groups.setdefault((session.session_id, group), []).append(child.conversation.turns[0].blocks)
    siblings = [blocks for blocks in groups.values() if len(blocks) > 1]
    assert 0.25 < len(siblings) / len(groups) < 0.65  # 45 % of the groups
    for blocks in siblings:
        assert len({tuple(runs[0])[: AGENT_WORKLOAD.subagent_head_tokens // 64] for runs in blocks}) == 1
        assert len({runs[1].start for runs in blocks}) == len(blocks)


def test_text_of_generated_sessions_has_the_ideal_of_its_blocks() -> None:
    """The ideal measured on the text of 30 sessions is within a point of that of their blocks."""
    ideal = IdealCache()
    weight = shared = 0.0
    seen: set[tuple[int, int]] = set()
    block_hits = block_total = 0
    chosen = [
        limit_turns(replace(s), 25)
        for s in generate_sessions(30, seed=5, workload=replace(AGENT_WORKLOAD, spawning_share=0))
    ]
    for session in chosen:
        script = Script(
            session.main, namespace=session.namespace, scale=TextScale(64, Fraction(1, 32)), vocabulary=WORDS
        )
        for turn in session.main.turns:
            messages = script.messages(turn)
            shared += turn.input_tokens * ideal.share(messages)
            weight += turn.input_tokens
            is_shared, position = True, 0
            for run in turn.blocks:
                for block in run:
                    is_shared = is_shared and (block, position) in seen
                    block_hits += is_shared
                    seen.add((block, position))
                    position += 1
            block_total += position
    assert shared / weight == pytest.approx(block_hits / block_total, abs=0.01)


def test_lognormal_quantiles() -> None:
    """The median at .5, the median times e^sigma at .8413, clamped at both ends."""
    drawn = LogNormal(100, 0.5, 50, 300)
    assert drawn.at(0.5) == pytest.approx(100)
    assert drawn.at(0.841344746) == pytest.approx(164.872127)
    assert drawn.at(1e-12) == 50
    assert drawn.at(1 - 1e-12) == 300
