"""How fast a rank prefills, learned from its first-token times; and how far its predictions are believed."""

from __future__ import annotations

import math
import statistics
from collections import deque

from router.core.types import RankPace, Trust

#: Prefills shorter than this say more about overheads than about speed.
MIN_SAMPLE_TOKENS = 64
#: Prefills shorter than this say nothing of what attention costs.
MIN_ATTENTION_TOKENS = 1024
#: The speed is taken to be known after so many prefills. What attention costs is learned then, and more slowly.
_FIRST_SAMPLES = 20
#: From then on it is not learned more often than this.
_FIT_SECONDS = 0.1
#: Of so many prefills of a kind the median is taken: an odd number, and enough to be steady.
_SAMPLES_OF_A_KIND = 9
#: So many of a kind say as much of a rank as more would.
_MOST_WEIGHT = 4
#: What is believed beforehand weighs so much of one sample.
_PRIOR_WEIGHT = 0.04
#: What a first token takes besides, before anything is known: for each, and for each token of its context.
_OVERHEAD_SECONDS, _READING_TOKEN_SECONDS = 0.025, 3e-7
#: A kind that is further off, in logarithms, pulls no harder.
_NOISE = 0.1
#: A fit goes on from where the last one was, until a round moves the factor by less; but for so many rounds at most.
_MOST_ROUNDS, _CLOSE = 10, 0.005
#: What was seen counts half after so long, and after so long no more once something newer of its kind is seen.
_HALF_LIFE_SECONDS, _MEMORY_SECONDS = 600.0, 1800.0
#: How often ranks are told what the others have shown.
_REVIEW_SECONDS = 30.0
_STEADY_WEIGHT = 0.05
_ATTENTION_WEIGHT = 0.03
#: The spread of attention's share of a prefill's time, squared, that is taken for granted before any is seen.
_SHARE_VARIANCE = 0.01
_LARGEST_STEP = math.log(4.0)
_TRUST_WEIGHT = 0.1


def prior(prefill_tokens_per_second: float, *, transfer_tokens_per_second: float = 200_000.0) -> RankPace:
    """The pace of a rank that has shown nothing yet. At 100,000 tokens of context a token costs a half more."""
    token_seconds = 1.0 / prefill_tokens_per_second
    return RankPace(
        token_seconds=token_seconds,
        attention_seconds=token_seconds * 0.5 / 100_000,
        transfer_token_seconds=1.0 / transfer_tokens_per_second,
    )


def prefill_seconds(pace: RankPace, *, uncached_tokens: int, context_tokens: int) -> float:
    """Seconds to compute the last ``uncached_tokens`` of a context of ``context_tokens``."""
    attention = uncached_tokens * (context_tokens - uncached_tokens / 2)
    return pace.factor * (pace.token_seconds * uncached_tokens + pace.attention_seconds * attention)


#: A factor, seconds of overhead, and seconds to read a token.
Parts = tuple[float, float, float]


class _Kind:
    """The newest prefills of about the same length in about the same context, and their medians."""

    __slots__ = ("at", "context_tokens", "is_settled", "prefill_seconds", "samples", "served_seconds")

    def __init__(self) -> None:
        #: When, uncached and context tokens, and seconds served.
        self.samples: deque[tuple[float, int, int, float]] = deque(maxlen=_SAMPLES_OF_A_KIND)
        self.is_settled = False
        self.at = self.context_tokens = self.prefill_seconds = self.served_seconds = 0.0

    def add(self, sample: tuple[float, int, int, float]) -> None:
        """One more."""
        samples = self.samples
        self.at = sample[0]
        while samples and samples[0][0] < self.at - _MEMORY_SECONDS:
            samples.popleft()
        samples.append(sample)
        self.is_settled = False

    def settle(self, pace: RankPace) -> None:
        """Take the medians; prefill is what it would take with a factor of one."""
        self.is_settled = True
        prefills = [
            uncached * (pace.token_seconds + pace.attention_seconds * (context - uncached / 2))
            for _, uncached, context, _ in self.samples
        ]
        ratios = [sample[3] / prefill for sample, prefill in zip(self.samples, prefills, strict=True)]
        middle = (len(prefills) - 1) // 2
        self.context_tokens = sorted([sample[2] for sample in self.samples])[middle]
        self.prefill_seconds = sorted(prefills)[middle]
        self.served_seconds = self.prefill_seconds * sorted(ratios)[middle]


class PaceLearner:
    """Learns a rank's ``factor``, and apart from it what its first tokens take besides: ``overhead_seconds`` for each
    (HTTP, scheduling, a decode step), and ``reading_token_seconds`` for each token of a prompt, cached or not.

    The three fit best, in logarithms, to the medians of prefills of each kind. So a time says as much of the speed as
    prefill is of it: who is asked for little at a time is not slow for its overhead, and many short prefills do not
    outvote a long one. A kind that fits nothing pulls no harder than others (Huber's loss). A little is believed
    beforehand, that a rank is like the others, and what was seen long ago weighs less than that.

    With each of the first samples the factor may be four times further from its guess: one fifty times off is gone
    with the third, and so is a first sample that took a thousand times as long as it should.

    What attention costs is learned by how far those prefills of which it is a large share are further off than others
    (least mean squares, in logarithms).
    """

    def __init__(self, pace: RankPace, peers: PacePeers | None = None) -> None:
        self.pace = pace
        self.overhead_seconds, self.reading_token_seconds = _OVERHEAD_SECONDS, _READING_TOKEN_SECONDS
        self._samples = 0
        self._kinds: dict[tuple[int, int], _Kind] = {}
        self._fitted_at = -math.inf
        self._guess = pace.factor
        self._expected = self.parts
        self._transfers = 0
        self._attention_share = 0.0
        self._peers = PacePeers() if peers is None else peers
        self._peers.join(self)

    @property
    def is_untried(self) -> bool:
        """Nothing has been observed of its prefills."""
        return not self._samples

    @property
    def parts(self) -> Parts:
        """What it has learned."""
        return (self.pace.factor, self.overhead_seconds, self.reading_token_seconds)

    def leave(self) -> None:
        """The rank is gone."""
        self._peers.leave(self)

    def observe(self, *, served_seconds: float, uncached_tokens: int, context_tokens: int, now: float) -> None:
        """One first token came ``served_seconds`` after the rank began on it."""
        if uncached_tokens < MIN_SAMPLE_TOKENS or served_seconds <= 0.0:
            return
        pace = self.pace
        expected = prefill_seconds(pace, uncached_tokens=uncached_tokens, context_tokens=context_tokens)
        attention_share = 1.0 - pace.factor * pace.token_seconds * uncached_tokens / expected
        expected += self.overhead_seconds + self.reading_token_seconds * context_tokens
        error = _bounded_log(served_seconds / expected)
        if not self._samples:
            self._guess, self._expected = pace.factor, self.parts
        self._samples += 1
        key = (uncached_tokens.bit_length(), context_tokens.bit_length() // 2)
        kind = self._kinds.get(key)
        if kind is None:
            kind = self._kinds[key] = _Kind()
        kind.add((now, uncached_tokens, context_tokens, served_seconds))
        is_known = self._samples > _FIRST_SAMPLES
        if not is_known or now - self._fitted_at >= _FIT_SECONDS:
            self._fit(now=now)
            if is_known and uncached_tokens >= MIN_ATTENTION_TOKENS:
                self._learn_attention(error, attention_share)
        self._peers.observed(now=now)

    def _learn_attention(self, error: float, share: float) -> None:
        """A prefill of which attention is that ``share`` was so far off."""
        apart = share - self._attention_share
        self._attention_share += _weight(self._samples) * apart
        self.pace.attention_seconds *= math.exp(_ATTENTION_WEIGHT * error * apart / (apart * apart + _SHARE_VARIANCE))

    def expect(self, expected: Parts, *, now: float) -> None:
        """That it is like the others, by what they have shown."""
        self._expected = expected
        self._fit(now=now)

    def _fit(self, *, now: float) -> None:
        """By a descent on a bound of the squares that falls apart into one for each part, whose shares of a time make
        up the whole of it: no part can take too large a step, and those that are hard to tell apart take small ones.
        """
        self._fitted_at = now
        factor, overhead, reading = self.parts
        expected_factor, expected_overhead, expected_reading = self._expected
        seen = []
        for kind in self._kinds.values():
            if not kind.is_settled:
                kind.settle(self.pace)
            fading = math.exp2((kind.at - now) / _HALF_LIFE_SECONDS)
            weight = fading * min(len(kind.samples), _MOST_WEIGHT)
            seen.append((kind.prefill_seconds, kind.context_tokens, kind.served_seconds, weight))
        for _ in range(_MOST_ROUNDS):
            factor_weight = overhead_weight = reading_weight = _PRIOR_WEIGHT
            factor_pull = _PRIOR_WEIGHT * math.log(expected_factor / factor)
            overhead_pull = _PRIOR_WEIGHT * math.log(expected_overhead / overhead)
            reading_pull = _PRIOR_WEIGHT * math.log(expected_reading / reading)
            for prefill, context, served, weight in seen:
                computing_seconds, reading_seconds = factor * prefill, reading * context
                seconds = computing_seconds + overhead + reading_seconds
                error = math.log(served / seconds)
                weight /= seconds * max(1.0, abs(error) / _NOISE)
                factor_weight += weight * computing_seconds
                overhead_weight += weight * overhead
                reading_weight += weight * reading_seconds
                factor_pull += weight * computing_seconds * error
                overhead_pull += weight * overhead * error
                reading_pull += weight * reading_seconds * error
            step = factor_pull / factor_weight
            factor *= math.exp(step)
            overhead *= math.exp(overhead_pull / overhead_weight)
            reading *= math.exp(reading_pull / reading_weight)
            if abs(step) < _CLOSE:
                break
        most = math.exp(_LARGEST_STEP * min(self._samples, _FIRST_SAMPLES))
        self.pace.factor = min(self._guess * most, max(self._guess / most, factor))
        self.overhead_seconds, self.reading_token_seconds = overhead, reading

    def observe_transfer(self, *, seconds: float, tokens: int) -> None:
        """A decode rank had ``tokens`` of a prompt fetched ``seconds`` after it was told where they are."""
        if tokens < MIN_SAMPLE_TOKENS or seconds <= 0.0:
            return
        self._transfers += 1
        expected = tokens * self.pace.transfer_token_seconds
        error = _bounded_log(seconds / expected)
        self.pace.transfer_token_seconds *= math.exp(_weight(self._transfers) * error)


class PacePeers:
    """Ranks that are taken to be alike: one that has shown nothing yet is as fast as the others have shown to be.

    Otherwise a prior that is too slow would let nobody try it, and one that is too fast would send everybody there.
    Nor would anybody try a rank again that was slow once, so of one that shows nothing for long the same is believed.
    """

    def __init__(self) -> None:
        self._learners: list[PaceLearner] = []
        self._reviewed_at = -math.inf

    def join(self, learner: PaceLearner) -> None:
        """One more rank."""
        self._learners.append(learner)
        self._share()

    def leave(self, learner: PaceLearner) -> None:
        """One less."""
        self._learners.remove(learner)

    def observed(self, *, now: float) -> None:
        """One of them has learned something."""
        self._share()
        if now - self._reviewed_at >= _REVIEW_SECONDS:
            self._reviewed_at = now
            self._review(now=now)

    def _share(self) -> None:
        """Tell the untried what the others have learned, by the mean of its logarithm."""
        untried = [learner for learner in self._learners if learner.is_untried]
        if not untried or len(untried) == len(self._learners):
            return
        tried = [learner for learner in self._learners if not learner.is_untried]
        factor, overhead_seconds, reading_token_seconds = (
            statistics.geometric_mean(part) for part in zip(*(learner.parts for learner in tried), strict=True)
        )
        attention_seconds = statistics.geometric_mean(learner.pace.attention_seconds for learner in tried)
        for learner in untried:
            learner.pace.factor, learner.pace.attention_seconds = factor, attention_seconds
            learner.overhead_seconds, learner.reading_token_seconds = overhead_seconds, reading_token_seconds

    def _review(self, *, now: float) -> None:
        """Tell each of the tried what the others of them have learned."""
        tried = [learner for learner in self._learners if not learner.is_untried]
        others = len(tried) - 1
        if others < 1:
            return
        logs = [[math.log(part) for part in learner.parts] for learner in tried]
        factors, overheads, readings = (math.fsum(column) for column in zip(*logs, strict=True))
        for learner, (factor, overhead, reading) in zip(tried, logs, strict=True):
            expected = (factors - factor, overheads - overhead, readings - reading)
            factor, overhead, reading = (math.exp(part / others) for part in expected)
            learner.expect((factor, overhead, reading), now=now)


def _bounded_log(ratio: float) -> float:
    """How far off an estimate is, observed over predicted; outliers count as four times off."""
    return min(_LARGEST_STEP, max(-_LARGEST_STEP, math.log(ratio)))


def _weight(samples: int) -> float:
    """Of the newest of so many observations."""
    return max(_STEADY_WEIGHT, 1.0 / (samples + 1))


def judge(trust: Trust, *, predicted_tokens: int, actual_tokens: int, slack_tokens: int) -> None:
    """Compare a finished request with its prediction: trust falls when less was reused, and recovers by agreement.

    Being ``slack_tokens`` (a block) short is no drift; more reuse than promised is fine.
    """
    if predicted_tokens <= 0:
        return
    kept = 1.0 if actual_tokens + slack_tokens >= predicted_tokens else actual_tokens / predicted_tokens
    trust.ratio += _TRUST_WEIGHT * (kept - trust.ratio)
