"""How fast a rank prefills, learned from its first-token times; and how far its predictions are believed."""

from __future__ import annotations

import math
import statistics

from router.core.types import RankPace, Trust

#: Prefills shorter than this say more about overheads than about speed.
MIN_SAMPLE_TOKENS = 64
#: Prefills shorter than this say nothing of what attention costs: to them overheads look like it.
MIN_ATTENTION_TOKENS = 1024
_STEADY_WEIGHT = 0.05
#: Of so many prefills the median is taken: an odd number, and enough to be steady.
_FIRST_SAMPLES = 15
#: What attention costs is learned when the speed is known, and more slowly.
_ATTENTION_SAMPLES = 20
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


class PaceLearner:
    """Moves a rank's ``factor`` towards observed over predicted service time, and what attention costs by how far those
    prefills of which it is a large share are further off than others (least mean squares, in logarithms).

    Of the first samples the median counts, as far as four times for each of them: a guess fifty times off is gone with
    the third, and so is a first one that took fifty times as long as it should. Then logarithms are averaged, and one
    outlier of a thousand weighs no more than one of four.
    """

    def __init__(self, pace: RankPace, peers: PacePeers | None = None) -> None:
        self.pace = pace
        self._samples = 0
        self._first: list[float] = []
        self._guess = pace.factor
        self._transfers = 0
        self._attention_share = 0.0
        self._peers = PacePeers() if peers is None else peers
        self._peers.join(self)

    @property
    def is_untried(self) -> bool:
        """Nothing has been observed of its prefills."""
        return not self._samples

    def leave(self) -> None:
        """The rank is gone."""
        self._peers.leave(self)

    def observe(self, *, served_seconds: float, uncached_tokens: int, context_tokens: int) -> None:
        """One first token came ``served_seconds`` after the rank began on it."""
        if uncached_tokens < MIN_SAMPLE_TOKENS or served_seconds <= 0.0:
            return
        pace = self.pace
        expected = prefill_seconds(pace, uncached_tokens=uncached_tokens, context_tokens=context_tokens)
        attention_share = 1.0 - pace.factor * pace.token_seconds * uncached_tokens / expected
        error = _bounded_log(served_seconds / expected)
        self._samples += 1
        weight = _weight(self._samples)
        if self._samples <= _FIRST_SAMPLES:
            pace.factor = self._median_factor(served_seconds * pace.factor / expected)
        else:
            pace.factor *= math.exp(_STEADY_WEIGHT * error)
        if uncached_tokens >= MIN_ATTENTION_TOKENS and self._samples > _ATTENTION_SAMPLES:
            apart = attention_share - self._attention_share
            self._attention_share += weight * apart
            pace.attention_seconds *= math.exp(_ATTENTION_WEIGHT * error * apart / (apart * apart + _SHARE_VARIANCE))
        self._peers.share()

    def _median_factor(self, factor: float) -> float:
        """Of the first samples, the newest included; no further from the first guess than so few can tell."""
        if not self._first:
            self._guess = self.pace.factor
        self._first.append(factor)
        most = self._samples * _LARGEST_STEP
        apart = math.log(statistics.median(self._first) / self._guess)
        return self._guess * math.exp(min(most, max(-most, apart)))

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
    """

    def __init__(self) -> None:
        self._learners: list[PaceLearner] = []

    def join(self, learner: PaceLearner) -> None:
        """One more rank."""
        self._learners.append(learner)
        self.share()

    def leave(self, learner: PaceLearner) -> None:
        """One less."""
        self._learners.remove(learner)

    def share(self) -> None:
        """Tell the untried what the others have learned, by the mean of its logarithm."""
        untried = [learner for learner in self._learners if learner.is_untried]
        if not untried or len(untried) == len(self._learners):
            return
        tried = [learner.pace for learner in self._learners if not learner.is_untried]
        factor = statistics.geometric_mean(pace.factor for pace in tried)
        attention_seconds = statistics.geometric_mean(pace.attention_seconds for pace in tried)
        for learner in untried:
            learner.pace.factor, learner.pace.attention_seconds = factor, attention_seconds


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
