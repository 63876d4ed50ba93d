"""Attempts' claims on ranks: opened with a decision, and settled when the attempt is over, however it ended.

What is settled: load, breaker, the session's home, what the rank's cache is expected to hold, what the rank reused
against what was expected, its speed, admission, and the record of the decision.

A stream begins with its first token, when its prompt is computed. Of an answer that comes whole nobody hears when that
was: unless it is there before its prompt should be computed, it says nothing of how fast the rank computes prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from router.core.admission import Visit
from router.core.load import Claim, wait_seconds
from router.core.output_lengths import OutputLengths
from router.core.pace import judge
from router.core.pd import transfer_seconds
from router.core.session_table import Binding
from router.core.shared_allocation import AnyAllocation
from router.core.types import Decision, RankStatus
from router.fleet.decisions import Attempted, DecisionLog
from router.fleet.fleet import Fleet
from router.fleet.member import Member
from router.proxy.holding import Holding
from router.proxy.prepared import PreparedRequest
from router.proxy.promises import Promise, Promises, computed_of, counts_at_dispatch
from router.proxy.splitting import learn_pace
from router.proxy.types import BROKEN_OFF_HERE, COMPUTED_NOTHING, Outcome
from router.telemetry.metrics import Metrics
from router.wire.usage import Usage

#: Ends after which the rank's cache has the prompt and what there is of the answer.
_LEAVES_CONTEXT = BROKEN_OFF_HERE | {Outcome.OK}


class Leases:
    """Opens leases, and keeps the accounts of them."""

    def __init__(
        self,
        fleet: Fleet,
        metrics: Metrics,
        promises: Promises,
        holding: Holding | None,
        decisions: DecisionLog,
        *,
        lengths: OutputLengths,
    ) -> None:
        self.clock: Callable[[], float] = fleet.clock
        self.knows: Callable[[Member], bool] = fleet.knows
        self.beside: Callable[[Member], frozenset[int]] = fleet.beside
        self._fleet = fleet
        self._metrics = metrics
        self._is_shared = fleet.shared.is_shared
        self._promises = promises
        self._holding = holding
        self._decisions = decisions
        self._lengths = lengths

    def _tell_home(self, prepared: PreparedRequest, member: Member) -> None:
        assert prepared.session is not None, "only a session has a home"
        self._fleet.shared.bound(
            prepared.model,
            prepared.session,
            member.id,
            prompt_tokens=prepared.prompt_tokens,
            is_prefill=member.is_prefill,
        )

    def open(self, prepared: PreparedRequest, decision: Decision, *, now: float) -> Lease:
        """A lease on the decision's own rank; of a pair, on the one that is handed the prompt."""
        fleet = self._fleet
        member = fleet.member(decision.slot)
        fleet.breakers.sent(decision.slot, now=now)
        is_handed = decision.prefill is not None
        heard_by = None  # of an answer that comes whole nobody hears when its prompt has been computed
        if not prepared.is_streamed and prepared.output_tokens > 1 and not member.is_prefill:
            heard_by = now
            if not is_handed:
                heard_by += wait_seconds(fleet.loads.total(decision.slot), member.pace, now=now)
                heard_by += decision.expected_prefill_seconds
        claim = fleet.loads.open(
            decision.slot,
            prompt_tokens=prepared.prompt_tokens,
            prefill_tokens=0 if is_handed else prepared.prompt_tokens - decision.expected_cached_tokens,
            seconds=(
                transfer_seconds(member.pace, tokens=decision.transfer_tokens)
                if is_handed
                else decision.expected_prefill_seconds
            )
            / member.pace.factor,
            now=now,
            heard_by=heard_by,
        )
        binding = None
        if prepared.session is not None:
            binding = fleet.homes(is_prefill=member.is_prefill).start(
                prepared.model, prepared.session, slot=decision.slot, now=now
            )
            if self._is_shared:
                self._tell_home(prepared, member)
        lease = Lease(self, prepared, decision, member, claim, binding)
        if prepared.tokens is None:
            fleet.texts.add(decision.slot, prepared.text_keys or ())
            return lease
        lease.allocation = self._promises.sent(member, prepared)
        if not is_handed:
            if counts_at_dispatch(member):
                promise = self._promises.prompt(member, prepared)
            else:
                promise = self._promises.pieces(member, prepared, cached_tokens=decision.expected_cached_tokens)
            if promise:
                lease.promises.append(promise)
        return lease

    def first_byte(self, lease: Lease, generated: Callable[[], int] | None) -> None:
        now, noted, prepared = self.clock(), lease.noted, lease.prepared
        is_keyed = prepared.tokens is not None
        if self._fleet.knows(lease.member):
            self._fleet.breakers.begun(lease.member.slot)
        if noted is not None and not lease.member.is_prefill:
            noted.first_token_seconds = now - noted.started
        if is_keyed:
            self._filled(lease, generated)
        if self._holding is not None and lease.visit is not None:
            self._holding.first_token(lease.visit)
        served = self._fleet.loads.first_byte(lease.claim, now=now)
        if served is None or not is_keyed or lease.is_loading:
            return
        decision = lease.decision
        is_whole = lease.claim.heard_by is not None
        if is_whole and (decision.prefill is not None or served >= decision.expected_prefill_seconds):
            return
        learn_pace(lease.member, decision, prompt_tokens=prepared.prompt_tokens, served_seconds=served)

    def _filled(self, lease: Lease, generated: Callable[[], int] | None) -> None:
        """The prompt's blocks are there now."""
        is_promised = bool(lease.promises) and counts_at_dispatch(lease.member)
        if not is_promised and (promise := self._promises.prompt(lease.member, lease.prepared)):
            lease.promises.append(promise)
        self._promises.begun(lease.allocation)
        if generated is not None:
            self._promises.grows(lease.allocation, generated)

    def generated(self, lease: Lease, ids: Sequence[int]) -> None:
        """An answer that tells its ids has come so far."""
        member, prepared = lease.member, lease.prepared
        known, behind = lease.answer_keys, None
        if known is not None:
            behind = lease.promises[-1]
        elif member.index is not None:
            known = prepared.keys(member.index.block_tokens)
        if known is None:
            return
        if filled := self._promises.generated(member, prepared, ids, known=known, behind=behind):
            promise, lease.answer_keys = filled
            lease.promises.append(promise)

    def close(
        self,
        lease: Lease,
        outcome: Outcome,
        usage: Usage | None,
        output: Sequence[int],
        first_words: Callable[[], str] | None,
    ) -> None:
        now, fleet, member, prepared = self.clock(), self._fleet, lease.member, lease.prepared
        is_prefill = member.is_prefill
        # What has begun to come was computed, whatever is told in the middle of it.
        is_computed = outcome not in COMPUTED_NOTHING or not lease.claim.waiting
        fleet.loads.close(lease.claim, now=now, is_computed=is_computed)
        if fleet.knows(member):
            fleet.breakers.ended(member.slot, outcome.verdict, ranks=len(fleet.view.ranks), now=now)
            if outcome is Outcome.CONNECT:
                fleet.on_unreachable(member.id.worker)
            elif outcome is Outcome.PUSHBACK:
                fleet.full.turned_away(member.slot, now=now)
            elif outcome is Outcome.OK:
                fleet.full.forget(member.slot)
        if prepared.session is not None and lease.binding is not None:
            model, session = prepared.model, prepared.session
            is_answered = outcome in _LEAVES_CONTEXT  # else it is tried again
            homes = fleet.homes(is_prefill=is_prefill)
            homes.finish(model, session, lease.binding, now=now, is_answered=is_answered)
            if self._is_shared:
                shared = fleet.shared.home(model, session, is_prefill=is_prefill)
                if shared is not None and shared.rank == member.id:  # else it has moved on meanwhile
                    self._tell_home(prepared, member)
        if prepared.tokens is not None:
            self._settle(lease, outcome, usage, output, first_words, now=now)
        if usage is not None:
            self._read(lease, outcome, usage)
        if lease.noted is not None and not is_prefill and prepared.decided is not None:
            lease.noted.outcome = outcome
            lease.noted.seconds = now - lease.noted.started
            self._decisions.close(prepared.decided, lease.noted)
        if self._holding is not None and lease.visit is not None:
            told = usage if outcome is Outcome.OK else None
            self._holding.finished(
                lease.visit,
                is_kept=outcome is Outcome.OK or (lease.visit.has_begun and outcome in _LEAVES_CONTEXT),
                output_tokens=None if told is None or is_prefill else told.completion_tokens,
                cached_tokens=None if told is None or lease.decision.prefill is not None else told.cached_tokens,
                ideal_tokens=prepared.ideal_tokens if prepared.tokens is not None else None,
            )

    def _settle(
        self,
        lease: Lease,
        outcome: Outcome,
        usage: Usage | None,
        output: Sequence[int],
        first_words: Callable[[], str] | None,
        *,
        now: float,
    ) -> None:
        """What was promised of the rank's cache comes true, or is taken back."""
        member, prepared = lease.member, lease.prepared
        if outcome not in _LEAVES_CONTEXT:
            self._promises.take_back(lease.promises, lease.allocation)
            return
        if usage is not None and len(output) != usage.completion_tokens:
            output = ()  # not all ids were told
        computed = computed_of(output, is_cut=outcome in BROKEN_OFF_HERE)
        if promise := self._promises.output(member, prepared, computed):
            lease.promises.append(promise)
        elif usage is not None and not member.is_prefill:
            self._promises.answered(
                member, prepared, output_tokens=usage.completion_tokens, first_words=first_words, now=now
            )
        self._promises.keep(lease.promises, now=now)
        self._promises.leave(lease.allocation, member, prepared, computed, now=now)

    def _read(self, lease: Lease, outcome: Outcome, usage: Usage) -> None:
        """What the worker says of it."""
        if outcome is Outcome.OK and usage.completion_tokens > 0 and not lease.member.is_prefill:
            self._lengths.observe(lease.prepared.model, usage.completion_tokens)
        if lease.decision.prefill is not None:
            return  # the engine counts what it was handed as it likes
        if outcome is Outcome.OK and usage.cached_tokens is not None:
            self._compare(lease, prompt_tokens=usage.prompt_tokens, actual_tokens=usage.cached_tokens)
        if lease.noted is not None:
            lease.noted.prompt_tokens, lease.noted.cached_tokens = usage.prompt_tokens, usage.cached_tokens

    def _compare(self, lease: Lease, *, prompt_tokens: int, actual_tokens: int) -> None:
        metrics, member, decision = self._metrics, lease.member, lease.decision
        labels = member.labels
        predicted = decision.expected_cached_tokens
        metrics.prompt_tokens.labels(*labels).inc(prompt_tokens)
        metrics.cached_tokens.labels(*labels).inc(actual_tokens)
        metrics.predicted_tokens.labels(*labels).inc(predicted)
        metrics.best_tokens.labels(*labels).inc(decision.best_cached_tokens)
        metrics.ideal_tokens.labels(*labels).inc(lease.prepared.ideal_tokens)
        if actual_tokens != predicted:
            metrics.mispredicted.labels(*labels, "over" if predicted > actual_tokens else "under").inc()
        if actual_tokens and self._fleet.knows(member):
            self._promises.reused(member, lease.prepared, tokens=actual_tokens)
        if lease.prepared.tokens is not None:
            judge(
                member.trust,
                predicted_tokens=predicted,
                actual_tokens=actual_tokens,
                slack_tokens=member.block_tokens or 0,
            )


class Lease:
    """One attempt's claim on a rank; see ``proxy.types.Lease``."""

    __slots__ = (
        "_leases",
        "_open",
        "allocation",
        "answer_keys",
        "binding",
        "claim",
        "decision",
        "is_loading",
        "member",
        "noted",
        "prepared",
        "promises",
        "visit",
    )

    def __init__(
        self,
        leases: Leases,
        prepared: PreparedRequest,
        decision: Decision,
        member: Member,
        claim: Claim,
        binding: Binding | None,
    ) -> None:
        self._leases = leases
        self._open = True
        self.prepared = prepared
        self.decision = decision
        self.member = member
        self.claim = claim
        self.binding = binding
        self.noted: Attempted | None = None
        self.visit: Visit | None = None
        self.promises: list[Promise] = []
        #: Of the blocks that prompt and answer fill, once the answer tells.
        self.answer_keys: Sequence[int] | None = None
        self.allocation: AnyAllocation | None = None
        self.is_loading = False

    def first_byte(self, generated: Callable[[], int] | None = None) -> None:
        """Prefill is over."""
        self._leases.first_byte(self, generated)

    def handed(self) -> None:
        """Its part begins now: the other rank's is done."""
        self.claim.opened_at = self._leases.clock()

    def worker_answers(self) -> bool | None:
        """Whether the worker answers probes; None once it has left."""
        return self.member.status is not RankStatus.DOWN if self._leases.knows(self.member) else None

    def beside(self) -> frozenset[int]:
        """Slots of the same worker."""
        return self._leases.beside(self.member)

    def generated(self, ids: Sequence[int]) -> None:
        """Ids of the answer's tokens as far as they have come."""
        self._leases.generated(self, ids)

    def close(
        self,
        outcome: Outcome,
        usage: Usage | None,
        *,
        output: Sequence[int] = (),
        first_words: Callable[[], str] | None = None,
    ) -> None:
        """The attempt is over; once. ``output`` are the ids of the tokens it brought, where they are known, and
        ``first_words`` the text that they begin with.
        """
        if self._open:
            self._open = False
            self._leases.close(self, outcome, usage, output, first_words)
