"""Speed and trust as they are learned, against ranks whose true speed is known."""

from __future__ import annotations

import random

import pytest

from router.core.pace import MIN_SAMPLE_TOKENS, PaceLearner, PacePeers, judge, prefill_seconds, prior
from router.core.types import RankPace, Trust


def seconds(slower: float, *, uncached: int, context: int) -> float:
    """What a rank takes that is ``slower`` times as slow as the prior of 1,000 tokens/s says, by the formula's words:
    each uncached token 1 ms, and a half more for each 100,000 tokens that stand before it on average."""
    before = context - uncached / 2
    return slower * uncached * 0.001 * (1 + 0.5 * before / 100_000)


def learn(pace: RankPace, slower: list[float], *, seed: int = 0) -> None:
    """Feed one sample of a random prompt for each entry."""
    rng = random.Random(seed)
    learner = PaceLearner(pace)
    for factor in slower:
        context = rng.randrange(1_000, 100_000)
        uncached = rng.randrange(100, context + 1)
        served = seconds(factor, uncached=uncached, context=context)
        learner.observe(served_seconds=served, uncached_tokens=uncached, context_tokens=context)


@pytest.mark.parametrize(("uncached", "context"), [(1000, 1000), (100, 50_000), (100_000, 100_000), (0, 10)])
def test_the_prior_prices_tokens_and_attention(uncached: int, context: int) -> None:
    """At 1,000 tokens/s; a token at the end of 100,000 costs one and a half."""
    expected = seconds(1.0, uncached=uncached, context=context)

    assert prefill_seconds(prior(1000), uncached_tokens=uncached, context_tokens=context) == pytest.approx(expected)


@pytest.mark.parametrize("slower", [3.0, 1 / 3])
def test_a_rank_three_times_off_is_known_by_the_first_sample(slower: float) -> None:
    """And stays so."""
    for samples in (1, 20):
        pace = prior(1000)
        learn(pace, [slower] * samples)
        assert pace.factor == pytest.approx(slower, rel=0.01)


@pytest.mark.parametrize("slower", [50.0, 1 / 50])
def test_a_rank_fifty_times_off_is_known_by_the_third(slower: float) -> None:
    """Four times and sixteen times are believed before."""
    believed = {1: 4.0, 2: 16.0, 3: 50.0}
    for samples, factor in believed.items():
        pace = prior(1000)
        learn(pace, [slower] * samples)
        assert pace.factor == pytest.approx(factor if slower > 1 else 1 / factor)


def test_a_first_request_that_had_to_wait_for_a_compiler_is_forgotten() -> None:
    """A thousand times as long as it should have been: four times are believed, and nothing with the third sample."""
    pace = prior(1000)
    learn(pace, [1000.0])
    assert pace.factor == pytest.approx(4.0)

    pace = prior(1000)
    learn(pace, [1000.0, 1.0, 1.0])
    assert pace.factor == pytest.approx(1.0)


def test_a_rank_thirty_times_off_is_known_in_the_end() -> None:
    """A step is bounded, not the way."""
    pace = prior(1000)
    learn(pace, [30.0] * 200)

    assert pace.factor == pytest.approx(30.0, rel=0.05)


def test_noise_averages_out() -> None:
    """Samples between half and twice the truth, evenly in the logarithm, leave it within a fifth."""
    rng = random.Random(1)
    pace = prior(1000)
    learn(pace, [3.0 * 2 ** rng.uniform(-1, 1) for _ in range(200)])

    assert pace.factor == pytest.approx(3.0, rel=0.2)


@pytest.mark.parametrize("attention_ratio", [0.1, 1.5, 3.0])
@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_what_attention_costs_is_learned(attention_ratio: float, noise: float) -> None:
    """A token at 100,000 costs a tenth to three times more, not a half: known within 500 of an agent's prompts.

    Prompts of 10,000 to 200,000 tokens, a third of them cold, on a rank three times as slow as the prior says.
    """

    def truth(uncached: int, context: int) -> float:
        return 3.0 * uncached * 0.001 * (1 + attention_ratio * (context - uncached / 2) / 100_000)

    rng = random.Random(1)
    pace = prior(1000)
    learner = PaceLearner(pace)
    for _ in range(500):
        context = rng.randrange(10_000, 200_000)
        uncached = min(context, int(rng.choice((rng.lognormvariate(6.7, 1.1), rng.lognormvariate(8, 1), context))))
        served = truth(uncached, context) * rng.lognormvariate(0.0, noise)
        learner.observe(served_seconds=served, uncached_tokens=uncached, context_tokens=context)

    for uncached, context in ((1_000, 10_000), (1_000, 200_000), (20_000, 20_000), (150_000, 150_000)):
        foretold = prefill_seconds(pace, uncached_tokens=uncached, context_tokens=context)
        assert foretold == pytest.approx(truth(uncached, context), rel=0.05 if not noise else 0.15)


def test_short_prefills_do_not_look_like_attention() -> None:
    """200 tokens behind 100,000 take 50 ms more than they should: the speed is blamed, attention is not."""
    pace = prior(1000)
    learner = PaceLearner(pace)
    for _ in range(200):
        served = seconds(1.0, uncached=200, context=100_000) + 0.05
        learner.observe(served_seconds=served, uncached_tokens=200, context_tokens=100_000)
        learner.observe(served_seconds=seconds(1.0, uncached=200, context=200), uncached_tokens=200, context_tokens=200)

    assert pace.attention_seconds == prior(1000).attention_seconds


def test_prompts_that_are_all_alike_teach_the_speed() -> None:
    """3,000 noisy samples at the end of 50,000 tokens: of their own kind they foretell to a tenth."""
    rng = random.Random(2)
    pace = prior(1000)
    learner = PaceLearner(pace)
    for _ in range(3000):
        context = rng.randrange(49_000, 51_000)
        served = seconds(2.0, uncached=2000, context=context) * rng.lognormvariate(0.0, 0.2)
        learner.observe(served_seconds=served, uncached_tokens=2000, context_tokens=context)

    foretold = prefill_seconds(pace, uncached_tokens=2000, context_tokens=50_000)
    assert foretold == pytest.approx(seconds(2.0, uncached=2000, context=50_000), rel=0.1)


@pytest.mark.parametrize("outlier", [1000.0, 0.001])
def test_an_outlier_moves_a_known_pace_by_less_than_a_tenth(outlier: float) -> None:
    """A stall of minutes is one sample of many, and forty more mend it."""
    pace = prior(1000)
    learner = PaceLearner(pace)
    for factor in [1.0] * 20 + [outlier]:
        learner.observe(served_seconds=factor, uncached_tokens=1000, context_tokens=1000)
    assert 0.9 < pace.factor < 1.1


def test_one_outlier_in_ten_is_borne() -> None:
    """Every tenth request is a hundred times as slow: the pace stays within a third of the others'."""
    pace = prior(1000)
    learn(pace, [100.0 if number % 10 == 9 else 1.0 for number in range(200)])

    assert 0.75 < pace.factor < 1.34


@pytest.mark.parametrize(("uncached", "served"), [(MIN_SAMPLE_TOKENS - 1, 9.0), (0, 9.0), (1000, 0.0), (1000, -1.0)])
def test_what_cannot_measure_speed_is_ignored(uncached: int, served: float) -> None:
    """Tiny prefills and impossible times."""
    pace = prior(1000)
    PaceLearner(pace).observe(served_seconds=served, uncached_tokens=uncached, context_tokens=1000)

    assert pace.factor == 1.0


def test_the_untried_are_taken_to_be_as_fast_as_the_tried() -> None:
    """A rank that takes twice the prior's seconds, then one that takes four times: a third and one that joins later
    are taken at their mean, sqrt(8), until they show seconds of their own."""
    peers, paces = PacePeers(), [prior(1000) for _ in range(4)]
    first, second, third = (PaceLearner(pace, peers) for pace in paces[:3])
    first.observe(served_seconds=seconds(2.0, uncached=1000, context=1000), uncached_tokens=1000, context_tokens=1000)
    second.observe(served_seconds=seconds(4.0, uncached=1000, context=1000), uncached_tokens=1000, context_tokens=1000)
    PaceLearner(paces[3], peers)

    assert [pace.factor for pace in paces] == pytest.approx([2.0, 4.0, 8**0.5, 8**0.5])
    third.observe(served_seconds=seconds(8.0, uncached=1000, context=1000), uncached_tokens=1000, context_tokens=1000)
    assert [pace.factor for pace in paces[2:]] == pytest.approx([8.0, (2 * 4 * 8) ** (1 / 3)])


def test_who_has_left_teaches_nobody() -> None:
    """A rank that joins after the only tried one has gone starts from the prior."""
    peers = PacePeers()
    gone = PaceLearner(prior(1000), peers)
    gone.observe(served_seconds=4.0, uncached_tokens=1000, context_tokens=1000)
    gone.leave()
    pace = prior(1000)
    PaceLearner(pace, peers)

    assert pace.factor == 1.0


# --- trust --------------------------------------------------------------------------------------------


def judged(trust: Trust, *, predicted: int, actual: int, times: int = 1) -> float:
    for _ in range(times):
        judge(trust, predicted_tokens=predicted, actual_tokens=actual, slack_tokens=16)
    return trust.ratio


def test_trust_falls_when_nothing_promised_was_there() -> None:
    """A tenth of the way each time: 0.9, 0.81, ... 0.9^20."""
    trust = Trust()

    assert judged(trust, predicted=1000, actual=0) == pytest.approx(0.9)
    assert judged(trust, predicted=1000, actual=0) == pytest.approx(0.81)
    assert judged(trust, predicted=1000, actual=0, times=18) == pytest.approx(0.9**20)


def test_trust_settles_at_the_share_that_is_kept() -> None:
    """A rank that keeps half of what is promised is believed by half."""
    assert judged(Trust(), predicted=1000, actual=500, times=200) == pytest.approx(0.5)


def test_trust_recovers_by_agreement() -> None:
    """From 0.1 the lack shrinks by a tenth each time: 1 - 0.9 * 0.9^30."""
    assert judged(Trust(0.1), predicted=1000, actual=1000, times=30) == pytest.approx(1 - 0.9 * 0.9**30)


@pytest.mark.parametrize("actual", [984, 1000, 5000])
def test_a_block_short_or_more_than_promised_is_no_drift(actual: int) -> None:
    """16 tokens of slack, and no fault in better luck."""
    assert judged(Trust(), predicted=1000, actual=actual) == 1.0


def test_just_below_the_slack_is_drift() -> None:
    """17 tokens short of 1,000 keeps 983 thousandths."""
    assert judged(Trust(), predicted=1000, actual=983) == pytest.approx(1 - 0.1 * 0.017)


def test_no_promise_no_judgement() -> None:
    """Nothing was predicted, so nothing is learned, whatever was found."""
    assert judged(Trust(0.5), predicted=0, actual=700) == 0.5


def test_trust_stays_a_ratio() -> None:
    """Any series of outcomes keeps it between 0 and 1."""
    rng = random.Random(2)
    trust = Trust()
    for _ in range(1000):
        assert 0.0 <= judged(trust, predicted=rng.randrange(2000), actual=rng.randrange(2000)) <= 1.0


def test_transfers_are_learned_too() -> None:
    """A guess ten times off is within a third of the truth after twenty transfers; short ones say nothing."""
    pace = prior(1000, transfer_tokens_per_second=100_000.0)
    learner = PaceLearner(pace)
    learner.observe_transfer(seconds=1.0, tokens=8)
    assert pace.transfer_token_seconds == 1e-5
    for _ in range(20):
        learner.observe_transfer(seconds=0.1, tokens=1000)
    assert pace.transfer_token_seconds == pytest.approx(1e-4, rel=0.34)
    assert pace.factor == 1.0
