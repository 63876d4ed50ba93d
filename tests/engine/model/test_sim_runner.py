"""The timing model: what a step costs, and answers that depend on the request alone."""

from __future__ import annotations

import pytest

from engine_shim.runner.sim_runner import AnswerLength, SimRunner, StepTimes
from engine_shim.types import Batch, Chunk, Request, Sampled, Sampling


def request(prompt: tuple[int, ...], output: tuple[int, ...] = ()) -> Request:
    made = Request(id="r", prompt=prompt, sampling=Sampling(max_tokens=99))
    made.tokens.extend(output)
    return made


def chunk(of: Request, start: int, count: int) -> Chunk:
    return Chunk(of, start, count, tables=(), samples=start + count == len(of.tokens), draws=len(of.output))


def test_a_step_costs_the_sum_of_its_parts() -> None:
    """Two decodes, a prefill of 100 tokens after 50, and a one-token end of a prefill."""
    times = StepTimes(
        prefill_tokens_per_second=1000.0,
        decode_step_seconds=0.01,
        decode_sequence_seconds=0.001,
        attention_seconds_per_pair=1e-6,
    )
    decode = request((1, 2, 3), (4,))
    batch = Batch(
        (
            chunk(decode, 3, 1),
            chunk(decode, 3, 1),
            chunk(request((0,) * 200), 50, 100),
            chunk(request((0,) * 11), 10, 1),
        )
    )
    # 101 prefilled tokens; pairs: 100 x 50 + 100 x 101 / 2, and 10 + 1.
    assert times.seconds(batch) == pytest.approx(0.101 + (5000 + 5050 + 11) * 1e-6 + 0.01 + 2 * 0.001)


def test_no_decode_no_decode_step() -> None:
    """A batch of prefills alone pays no decode step."""
    times = StepTimes(prefill_tokens_per_second=10.0, decode_step_seconds=5.0)
    assert times.seconds(Batch((chunk(request((1,) * 20), 0, 20),))) == pytest.approx(2.0)


def test_the_runner_sleeps_the_modelled_time_once_a_step() -> None:
    """The injected sleep gets the step's seconds."""
    slept: list[float] = []
    runner = SimRunner(StepTimes(100.0, 0.5), token_ids=[7], sleep=slept.append)
    assert runner.run(Batch((chunk(request((1,) * 50), 0, 50),))) == [Sampled((7,))]
    assert slept == pytest.approx([0.5])


def generate(
    prompt: tuple[int, ...],
    tokens: int,
    *,
    chunk_tokens: int,
    length: AnswerLength | None = None,
    ignore_eos: bool = False,
) -> list[int]:
    runner = SimRunner(StepTimes(1.0, 1.0), token_ids=range(100, 900), answer_length=length, sleep=lambda _: None)
    made = Request(id="r", prompt=prompt, sampling=Sampling(max_tokens=tokens, ignore_eos=ignore_eos))
    computed = 0
    while len(made.output) < tokens:
        count = min(chunk_tokens, len(made.tokens) - computed)
        sampled = runner.run(Batch((chunk(made, computed, count),)))
        computed += count
        made.tokens.extend(token for each in sampled for token in each.tokens)
    return made.output


def test_answers_follow_from_the_request_alone() -> None:
    """However the prompt is chunked, the answer is the same; another prompt gets another."""
    prompt = tuple(range(40))
    answer = generate(prompt, 20, chunk_tokens=7)
    assert answer == generate(prompt, 20, chunk_tokens=64)
    assert answer != generate((*prompt[:-1], 99), 20, chunk_tokens=64)
    assert all(100 <= token < 900 for token in answer)
    assert len(set(answer)) > 10


def test_a_preempted_request_goes_on_where_it_was() -> None:
    """Recomputing prompt and output in one chunk samples the token that would have come."""
    answer = generate((1, 2, 3), 10, chunk_tokens=8)
    runner = SimRunner(StepTimes(1.0, 1.0), token_ids=range(100, 900), sleep=lambda _: None)
    resumed = request((1, 2, 3), tuple(answer[:6]))
    assert runner.run(Batch((chunk(resumed, 0, 9),))) == [Sampled((answer[6],))]


def test_an_answer_ends_by_itself() -> None:
    """Half to one and a half times the mean, spread over prompts, the same for equal ones, the mean on average."""
    length = AnswerLength(mean_tokens=20, eos_token_id=2)
    ends = []
    for prompt in range(300):
        answer = generate((prompt, 1), 31, chunk_tokens=8, length=length)
        assert answer[: answer.index(2)] == generate((prompt, 1), answer.index(2), chunk_tokens=1)
        ends.append(answer.index(2))
    assert set(ends) <= set(range(10, 31))
    assert len(set(ends)) > 15
    # The standard deviation of one uniform draw from 10 to 30 is 6.06; of the mean of 300, 0.35.
    assert sum(ends) / 300 == pytest.approx(20, abs=1.5)


def test_ignore_eos_lets_an_answer_go_on() -> None:
    """It is then the answer of a runner that ends none."""
    length = AnswerLength(mean_tokens=4, eos_token_id=2)
    answer = generate((1, 2), 50, chunk_tokens=8, length=length, ignore_eos=True)
    assert answer == generate((1, 2), 50, chunk_tokens=8)


def test_nonsense_is_refused() -> None:
    """A rate of nothing, or nothing to answer with, is an error at once."""
    with pytest.raises(ValueError, match="prefill_tokens_per_second"):
        StepTimes(prefill_tokens_per_second=0.0, decode_step_seconds=1.0)
    with pytest.raises(ValueError, match="mean_tokens"):
        AnswerLength(mean_tokens=0, eos_token_id=2)
    with pytest.raises(ValueError, match="token_ids"):
        SimRunner(StepTimes(1.0, 1.0), token_ids=[])
