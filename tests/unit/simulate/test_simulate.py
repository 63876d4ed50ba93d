"""Whole runs over small made-up recordings: same seed same result, nobody better than ideal, and who wins where."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.simulate.cli import build_parser, main
from loadtest.simulate.comparators import POLICIES
from loadtest.simulate.engine import prefill_work
from loadtest.simulate.measure import PolicyResult, quantile
from loadtest.simulate.run import simulate
from loadtest.simulate.scenario import Scenario
from loadtest.simulate.speed import slowdown_for
from loadtest.simulate.workload import Recording, Shared, load_recording, plays

#: Twenty minutes of four ranks at a quarter of full speed.
SMALL = Scenario(ranks=4, lanes=24, pool_tokens=400_000, slowdown=4.0, warm_up_seconds=300.0, window_seconds=900.0)


def write_sessions(path: Path, *, sessions: int = 40, turns: int = 30) -> Path:
    """Sessions that grow from 20,000 tokens by 640 a turn, one every ten seconds."""
    lines = []
    for number in range(sessions):
        requests = [
            {
                "t": 10.0 * turn,
                "api_time": 2.0,
                "in": 64 * (300 + number + 10 * turn),
                "out": 50,
                "hash_runs": [1, 300 + number + 10 * turn],
            }
            for turn in range(turns)
        ]
        row = {"id": f"s{number}", "block_size": 64, "tool_tokens": 0, "system_tokens": 0, "requests": requests}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines))
    return path


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    return load_recording(write_sessions(tmp_path_factory.mktemp("trace") / "sessions.jsonl"))


def test_the_same_seed_gives_the_same_result(recording: Recording) -> None:
    """Twice the same figures, and others for another seed."""
    first = simulate(recording, SMALL, "affinity")

    assert simulate(recording, SMALL, "affinity") == first
    assert simulate(recording, replace(SMALL, seed=2), "affinity") != first


@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_hits_more_than_an_endless_cache(recording: Recording, policy: str) -> None:
    """Every policy serves, within the bounds of arithmetic."""
    result = simulate(recording, SMALL, policy)

    assert 0.0 < result.hit_rate <= result.ideal_hit_rate < 1.0
    assert result.requests > 50
    assert 0.0 < result.turns_per_second <= SMALL.lanes / 8.0  # no lane's cycle is shorter than its gap of 8 s
    assert 1.0 <= result.imbalance <= SMALL.ranks
    assert 0.0 <= result.moved_share <= 1.0
    assert result.ttft_seconds.p50 <= result.ttft_seconds.p90 <= result.ttft_seconds.p99


def test_affinity_keeps_sessions_where_their_prefix_is(recording: Recording) -> None:
    """With room for all, hits are near the ideal and nobody moves; taking turns loses three of four."""
    roomy = replace(SMALL, pool_tokens=2_000_000)
    affinity, turns = (simulate(recording, roomy, name) for name in ("affinity", "round_robin"))

    assert affinity.hit_rate > affinity.ideal_hit_rate - 0.02
    assert affinity.moved_share < 0.02
    assert affinity.hold_seconds.max == 0.0
    assert turns.hit_rate < affinity.hit_rate
    assert turns.moved_share > 0.7


def test_admission_multiplies_throughput_past_the_cliff(recording: Recording) -> None:
    """Sixty contexts of 30,000 tokens want four times what four pools of 110,000 hold, and ranks are slow."""
    tight = replace(SMALL, pool_tokens=110_000, lanes=60, slowdown=15.0)
    affinity, price, sticky = (simulate(recording, tight, name) for name in ("affinity", "price", "sticky"))

    assert affinity.turns_per_second > 1.5 * max(price.turns_per_second, sticky.turns_per_second)
    assert affinity.hit_rate > 1.5 * price.hit_rate
    assert affinity.hold_seconds.max > 0.0
    assert price.hold_seconds.max == 0.0


def test_a_slow_rank_gets_what_it_can_do(recording: Recording) -> None:
    """Three times slower, and still no busier than the others by much: its speed is learned."""
    slow = replace(SMALL, pool_tokens=2_000_000, slow_rank_factor=3.0)

    assert simulate(recording, slow, "affinity").imbalance < 1.6


def test_a_rank_that_dies_takes_nothing_along(recording: Recording) -> None:
    """It is gone for five of fifteen minutes: sessions go on elsewhere, and it is used again afterwards."""
    calm = replace(SMALL, pool_tokens=2_000_000)
    whole = simulate(recording, calm, "affinity")
    broken = simulate(recording, replace(calm, fail_at_seconds=400.0), "affinity")

    assert broken.turns_per_second > 0.8 * whole.turns_per_second
    assert broken.hit_rate < whole.hit_rate


def test_a_host_tier_gives_evicted_contexts_back(recording: Recording) -> None:
    """A tier of four pools where the pools are too small: first tokens come sooner."""
    tight = replace(SMALL, pool_tokens=110_000)
    without = simulate(recording, tight, "price")
    tiered = simulate(recording, replace(tight, host_ratio=4.0), "price")

    assert tiered.ttft_seconds.mean < without.ttft_seconds.mean
    assert tiered.turns_per_second > without.turns_per_second


def test_windows_are_lost_before_the_rest_if_their_pool_is_small(recording: Recording) -> None:
    """Six conversations a rank with windows of 64 blocks: 3,125 blocks hold all that come back, 125 only two.

    With room for all only the first two prompts with a shared head lose anything.
    """
    roomy = replace(SMALL, pool_tokens=2_000_000)
    without, wide, narrow = (
        simulate(recording, replace(roomy, window_tokens=tokens, window_pool_ratio=ratio), "affinity")
        for tokens, ratio in ((0, 0.1), (4096, 0.1), (4096, 0.004))
    )

    assert wide.hit_rate > without.hit_rate - 0.02
    assert narrow.hit_rate < 0.5 * without.hit_rate
    assert narrow.ideal_hit_rate == pytest.approx(without.ideal_hit_rate, abs=0.05)


def test_hundreds_of_ranks(recording: Recording) -> None:
    """Nothing but the price is paid for each rank."""
    many = replace(SMALL, ranks=300, lanes=60, window_seconds=60.0, warm_up_seconds=30.0)

    assert simulate(recording, many, "affinity").requests > 50


def test_plays_are_fresh_and_begin_where_they_should(recording: Recording) -> None:
    """The first play of a lane starts at 25 to 75 % of its turns, later ones at 0; they share no run but their head."""
    shared = Shared()
    first, second = itertools.islice(plays(recording, shared, seed=3, lane=0, lanes=2), 2)

    assert 0.25 * 30 - 1 <= first.start <= 0.75 * 30
    assert second.start == 0
    (head, head_blocks), *own = first.path(0)
    assert head in shared.versions
    assert head_blocks == 12_000 // 64
    assert not {run for run, _ in own} & {run for run, _ in second.path(0)}


def test_utilisation_sets_the_speed(tmp_path: Path) -> None:
    """An open loop of ten equal prompts, nine of them cached but for one block, over nine seconds on two ranks."""
    trace = tmp_path / "mooncake.jsonl"
    rows = [
        {"timestamp": 1000 * second, "input_length": 5120, "output_length": 5, "hash_ids": list(range(10))}
        for second in range(10)
    ]
    trace.write_text("\n".join(map(json.dumps, rows)))
    work = prefill_work(5120, 5120) + 9 * prefill_work(512, 5120)

    slowdown = slowdown_for(
        load_recording(trace), utilisation=0.5, ranks=2, lanes=1, seed=1, speed_up=2.0, seconds=60.0
    )
    assert slowdown * work == pytest.approx(0.5 * 2 * 9 / 2.0)


def test_the_command_prints_what_is_promised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON object a policy with the agreed keys; without ``--json`` a table; a bad trace is one sentence."""
    trace = str(write_sessions(tmp_path / "sessions.jsonl", sessions=12, turns=12))
    arguments = ["--trace", trace, "--ranks", "2", "--lanes", "4", "--pool-tokens", "2e5", "--utilisation", "0.5"]
    arguments += ["--warm-up-seconds", "10", "--window-seconds", "60", "--policies", "affinity,sticky", "--quiet"]

    assert main([*arguments, "--seed", "7", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["policy"] for row in rows] == ["affinity", "sticky"]
    wanted = set(PolicyResult.__dataclass_fields__) | {"lanes", "pool_tokens", "seed", "utilisation"}
    assert wanted <= rows[0].keys()
    assert rows[0]["ttft_seconds"].keys() == {"mean", "p50", "p90", "p99"}
    assert rows[0]["hold_seconds"].keys() == {"p99", "max"}

    assert main([*arguments, "--seed", "1,2"]) == 0
    assert "| 4/0.2M/50 | affinity |" in capsys.readouterr().out
    assert main(["--trace", str(tmp_path / "absent")]) == 1
    assert "absent" in capsys.readouterr().err
    short = write_sessions(tmp_path / "short.jsonl", sessions=2, turns=9)
    assert main(["--trace", str(short)]) == 1
    assert "short.jsonl: no session is simulated: each has fewer than 10 turns or" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--trace", trace, "--policies", "best"])


@pytest.mark.parametrize(
    ("option", "value", "sentence"),
    [
        ("--pool-tokens", "inf", "must be a whole number of at least 1, not inf"),
        ("--pool-tokens", "nan", "must be a whole number of at least 1, not nan"),
        ("--lanes", "few", "must be a number, not 'few'"),
        ("--seed", "1,inf", "must be a whole number, not inf"),
        ("--ranks", "1.5", "must be a whole number of at least 1, not 1.5"),
        ("--utilisation", "65", "must be above 0 and at most 1, not 65"),
        ("--utilisation", ".4,0", "must be above 0 and at most 1, not 0"),
        ("--slow-rank", "inf", "must be above 0, not inf"),
        ("--warm-up-seconds", "nan", "must be at least 0, not nan"),
    ],
)
def test_a_value_that_is_no_use_is_refused(
    option: str, value: str, sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one sentence that names the option, and with the status of bad usage."""
    with pytest.raises(SystemExit) as ended:
        main(["--trace", "absent", option, value])

    assert ended.value.code == 2
    assert capsys.readouterr().err.endswith(f"argument {option}: {sentence}\n")


def test_a_warm_up_longer_than_the_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ten requests over nine seconds, twice as fast: of them nothing is counted after five, and all from the start."""
    trace = tmp_path / "open.jsonl"
    rows = [{"timestamp": 1000 * n, "input_length": 512, "output_length": 1, "hash_ids": [n]} for n in range(10)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--trace", str(trace), "--speed-up", "2", "--policies", "affinity", "--quiet", "--json"]

    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--warm-up-seconds", "5"])
    assert ended.value.code == 2
    assert "the trace ends after 4 s, before 5 s of warm-up" in capsys.readouterr().err
    assert main([*arguments, "--warm-up-seconds", "0", "--window-seconds", "60"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["requests"] == 10


def test_a_pool_that_holds_no_prompt_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The shortest prompt has 512 tokens: pools of 511 serve nobody, those of 1,024 do."""
    trace = tmp_path / "open.jsonl"
    rows = [{"timestamp": n, "input_length": 512 * n, "output_length": 1, "hash_ids": [*range(n)]} for n in (1, 2)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    arguments = ["--trace", str(trace), "--warm-up-seconds", "0", "--policies", "affinity", "--quiet", "--json"]

    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--pool-tokens", "2e6,511"])
    assert ended.value.code == 2
    assert "511 hold not even the shortest prompt of the trace, which has 512 tokens" in capsys.readouterr().err
    assert main([*arguments, "--pool-tokens", "1024", "--window-seconds", "60"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["requests"] >= 1


def test_a_grid_with_every_policy_can_be_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One file for each policy and seed, of which the same tables come again. A folder that is a file is refused."""
    trace = str(write_sessions(tmp_path / "sessions.jsonl", sessions=12, turns=12))
    arguments = ["--trace", trace, "--ranks", "2", "--lanes", "4", "--utilisation", "0.5", "--warm-up-seconds", "10"]
    arguments += ["--window-seconds", "60", "--seed", "1,2", "--policies", "all", "--results", str(tmp_path / "kept")]

    assert main(arguments) == 0
    first = capsys.readouterr()
    assert len(list((tmp_path / "kept").iterdir())) == 2 * len(POLICIES)
    assert f"26 of {2 * len(POLICIES)}: 4/2M/50 seed 2 mooncake" in first.err
    assert main([*arguments, "--quiet"]) == 0
    assert capsys.readouterr().out == first.out
    assert main(["--trace", trace, "--results", trace]) == 1
    assert capsys.readouterr().err == f"homing simulate: --results {trace}: File exists\n"
    for idle in (["--window-tokens", "64", "--host-ratio", "4"], ["--speed-up", "2"], ["--fail-at", "5400"]):
        with pytest.raises(SystemExit):
            main(["--trace", trace, *idle])
        assert f"argument {idle[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize(("share", "expected"), [(0.0, 1.0), (0.5, 2.5), (0.9, 3.7), (1.0, 4.0)])
def test_quantiles_lie_between_neighbours(share: float, expected: float) -> None:
    """Of 1, 2, 3, 4: places 0, 1.5, 2.7 and 3."""
    assert quantile([1.0, 2.0, 3.0, 4.0], share) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("option", "given", "expected"),
    [
        ("--policies", "price,sticky,price", ["price", "sticky"]),
        ("--seed", "2,1,2", [2, 1]),
        ("--lanes", "8,8", [8]),
        ("--pool-tokens", "2e6,2000000", [2_000_000]),
        ("--utilisation", "0.5,0.50", [0.5]),
    ],
)
def test_what_is_named_twice_is_run_once(option: str, given: str, expected: list[object]) -> None:
    """In the order in which it was named first."""
    options = build_parser().parse_args(["--trace", "absent", option, given])
    assert getattr(options, option.strip("-").replace("-", "_")) == expected
