"""Sessions played closed loop over concurrent lanes.

A lane holds one session, its subagents included, until the last of them has drained; then it draws the next. A turn is
sent when the turn before it was answered, the subagents that it waits for have ended, and the recorded gap has
passed. What is sent depends on the sessions and the plan alone, never on the number of lanes or on the answers
(unless they are to be quoted), so two runs of one plan send the same requests.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction

import msgspec
import xxhash

from loadtest.answer import Answer, Outcome
from loadtest.client import ChatClient
from loadtest.ideal import IdealCache, RequestDigest
from loadtest.identity import ClientProfile, Identity, identify
from loadtest.text import Message, Script, TextScale
from loadtest.types import Conversation, Session, Subagent

ERROR_BUDGET_AFTER_REQUESTS = 20


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """How sessions are played. Gaps are capped before they are scaled."""

    model: str
    lanes: int = 4
    scale_tokens: Fraction = Fraction(1, 32)
    scale_time: Fraction = Fraction(1, 60)
    gap_cap_seconds: float = 300.0
    max_seconds: float | None = None
    error_budget_ratio: float = 0.1
    profile: ClientProfile = ClientProfile.AIPERF
    salt: str = ""
    seed: int = 0
    ignore_eos: bool = True
    live_output: bool = False
    warm_start: bool = False


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request that was sent, and what came of it. ``sent_seconds`` counts from the run's start."""

    session: str
    agent: str
    turn: int
    sent_seconds: float
    body_bytes: int
    ideal_ratio: float
    is_warmup: bool
    answer: Answer


class Stop(StrEnum):
    """Why a run ended."""

    FINISHED = "finished"
    DURATION = "duration"
    INTERRUPTED = "interrupted"
    ERROR_BUDGET = "error budget"


@dataclass(frozen=True, slots=True)
class RunLog:
    """All that happened in a run, exchanges in the order of their end."""

    exchanges: tuple[Exchange, ...]
    duration_seconds: float
    sessions_played: int
    stopped: Stop
    request_digest: str


class Replay:
    """One run. ``on_exchange`` hears of each exchange when it ends."""

    def __init__(
        self,
        plan: ReplayPlan,
        client: ChatClient,
        *,
        sessions: Iterator[Session],
        vocabulary: Sequence[str],
        on_exchange: Callable[[Exchange], None] = lambda _: None,
    ) -> None:
        self._plan = plan
        self._client = client
        self._sessions = sessions
        self._vocabulary = vocabulary
        self._on_exchange = on_exchange
        self._ideal = IdealCache()
        self._digest = RequestDigest()
        self._exchanges: list[Exchange] = []
        self._errors = 0
        self._sessions_played = 0
        self._started = 0.0
        self._stop = asyncio.Event()
        self._stopped = Stop.FINISHED

    def stop(self, reason: Stop = Stop.INTERRUPTED) -> None:
        """Cut what is in flight and end the run; what was done is reported. The first reason stands."""
        if not self._stop.is_set():
            self._stopped = reason
            self._stop.set()

    async def run(self) -> RunLog:
        """Play all sessions, or until stopped."""
        self._started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            lanes = [group.create_task(self._lane()) for _ in range(self._plan.lanes)]
            watch = group.create_task(self._cancel_when_stopped(lanes))
            await asyncio.wait(lanes)
            watch.cancel()
        return RunLog(
            exchanges=tuple(self._exchanges),
            duration_seconds=time.perf_counter() - self._started,
            sessions_played=self._sessions_played,
            stopped=self._stopped,
            request_digest=self._digest.hex,
        )

    async def _cancel_when_stopped(self, lanes: list[asyncio.Task[None]]) -> None:
        try:
            async with asyncio.timeout(self._plan.max_seconds):
                await self._stop.wait()
        except TimeoutError:
            self.stop(Stop.DURATION)
        for lane in lanes:
            lane.cancel()

    async def _lane(self) -> None:
        for session in self._sessions:
            if session.start_seconds is not None:
                due_seconds = self._started + session.start_seconds * self._plan.scale_time
                await asyncio.sleep(max(0.0, due_seconds - time.perf_counter()))
            async with asyncio.TaskGroup() as agents:
                await self._converse(_Speaker(session, session.main), agents)
            self._sessions_played += 1

    async def _converse(self, speaker: _Speaker, agents: asyncio.TaskGroup) -> None:
        """Play one conversation; subagents run in ``agents``, which the lane waits for."""
        plan, session = self._plan, speaker.session
        script = Script(
            speaker.conversation,
            namespace=plan.salt + session.namespace,
            scale=TextScale(session.block_tokens, plan.scale_tokens),
            vocabulary=self._vocabulary,
        )
        identity = identify(
            plan.profile, session=plan.salt + session.session_id, agent=speaker.agent, parent=speaker.parent
        )
        first = self._first_turn(speaker)
        awaited: list[asyncio.Task[None]] = []
        for number, turn in enumerate(speaker.conversation.turns):
            messages = script.messages(turn)
            is_warmup = number == first - 1
            if number < first and not is_warmup:
                continue
            if awaited:
                await asyncio.wait(awaited)
                awaited.clear()
            if number > first:
                await self._pause(turn.gap_seconds)
            output_tokens = 1 if is_warmup else max(1, round(turn.output_tokens * plan.scale_tokens))
            body = self._body(messages, output_tokens=output_tokens, identity=identity)
            answer = await self._send(
                body, messages, speaker=speaker, turn=number, is_warmup=is_warmup, identity=identity
            )
            if answer.outcome is Outcome.REJECTED:
                return  # as a context overflow: the turns to come are longer still
            if is_warmup:
                continue
            if plan.live_output:
                script.record_answer(answer.content)
            for child in turn.subagents:
                task = agents.create_task(self._subagent(child, speaker, agents))
                if child.is_joined:
                    awaited.append(task)

    async def _subagent(self, child: Subagent, parent: _Speaker, agents: asyncio.TaskGroup) -> None:
        await self._pause(child.delay_seconds)
        await self._converse(
            _Speaker(parent.session, child.conversation, agent=child.agent_id, parent=parent.agent), agents
        )

    async def _pause(self, seconds: float) -> None:
        await asyncio.sleep(min(seconds, self._plan.gap_cap_seconds) * self._plan.scale_time)

    def _first_turn(self, speaker: _Speaker) -> int:
        """0, or with a warm start a turn between a quarter and three quarters of the main conversation."""
        if not self._plan.warm_start or speaker.agent:
            return 0
        drawn = xxhash.xxh3_64_intdigest(f"{self._plan.seed}/{speaker.session.session_id}/start".encode())
        return int(len(speaker.conversation.turns) * (0.25 + 0.5 * drawn / 2.0**64))

    def _body(self, messages: tuple[Message, ...], *, output_tokens: int, identity: Identity) -> bytes:
        body: dict[str, object] = {
            "model": self._plan.model,
            "messages": messages,
            "max_tokens": output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **identity.fields,
        }
        if self._plan.ignore_eos:
            body["ignore_eos"] = True
        return msgspec.json.encode(body)

    async def _send(
        self,
        body: bytes,
        messages: tuple[Message, ...],
        *,
        speaker: _Speaker,
        turn: int,
        is_warmup: bool,
        identity: Identity,
    ) -> Answer:
        self._digest.add(body)
        ideal_ratio = self._ideal.share(messages)
        sent_at = time.perf_counter()
        answer = Answer(Outcome.CANCELLED, "the run was stopped")
        try:
            answer = await self._client.chat(body, headers=identity.headers)
        finally:
            exchange = Exchange(
                session=speaker.session.session_id,
                agent=speaker.agent,
                turn=turn,
                sent_seconds=sent_at - self._started,
                body_bytes=len(body),
                ideal_ratio=ideal_ratio,
                is_warmup=is_warmup,
                answer=replace(answer, content=""),
            )
            self._exchanges.append(exchange)
            self._on_exchange(exchange)
        if answer.outcome is not Outcome.OK:
            self._errors += 1
        if self._errors > self._plan.error_budget_ratio * max(len(self._exchanges), ERROR_BUDGET_AFTER_REQUESTS):
            self.stop(Stop.ERROR_BUDGET)
        return answer


@dataclass(frozen=True, slots=True)
class _Speaker:
    """Who converses: the session's main conversation, or one of its subagents."""

    session: Session
    conversation: Conversation
    agent: str = ""
    parent: str = ""
