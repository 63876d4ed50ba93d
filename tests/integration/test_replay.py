"""``homing replay`` against a server that counts: what is sent, what is reported, and what goes wrong."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from loadtest.client import Address, ChatClient, Timeouts
from loadtest.generator import AGENT_WORKLOAD, LogNormal, generate_sessions
from loadtest.identity import ClientProfile
from loadtest.replay import Replay, ReplayPlan, RunLog, Stop
from loadtest.report import summarise
from loadtest.types import Conversation, Session, Subagent, Turn, conversations, limit_turns
from loadtest.words import WORDS
from tests.fakes.openai_server import PAGE_TOKENS, FakeServer, Fault
from tests.fakes.proxy_rig import until

PLAN = ReplayPlan(model="fake", lanes=3, scale_time=Fraction(0), error_budget_ratio=1.0)
WORKLOAD = replace(AGENT_WORKLOAD, spawning_share=1.0, subagent_groups=LogNormal(1, 0.1, 1, 2))


def agent_sessions(count: int, turns: int = 6) -> list[Session]:
    return [limit_turns(s, turns) for s in generate_sessions(count, seed=3, workload=WORKLOAD)]


def growing_session(turns: int, *, name: str = "s", subagents: tuple[Subagent, ...] = ()) -> Session:
    """Each turn adds two blocks of 64 tokens to the one before; subagents follow the first."""
    script = tuple(
        Turn(
            (range(2 * number + 2),),
            2 * number + 2,
            64 * (2 * number + 2),
            64,
            0.0,
            subagents if number == 0 else (),
        )
        for number in range(turns)
    )
    return Session(name, name, 64, Conversation(script, head_tokens=64))


async def play(
    server: FakeServer, sessions: list[Session], plan: ReplayPlan = PLAN, *, silence_seconds: float = 20.0
) -> RunLog:
    async with ChatClient(Address.parse(server.url), timeouts=Timeouts(silence_seconds=silence_seconds)) as client:
        return await Replay(plan, client, sessions=iter(sessions), vocabulary=WORDS).run()


async def test_every_turn_of_every_conversation_is_sent_once() -> None:
    """As many requests arrive as the sessions have turns, and the report counts the same."""
    sessions = agent_sessions(6)
    expected = sum(len(c.turns) for session in sessions for c in conversations(session))
    async with FakeServer() as server:
        log = await play(server, sessions)
    report = summarise(log)
    assert len(server.bodies) == report.requests == expected
    assert (report.errors, report.cancelled, report.sessions, log.stopped) == (0, 0, 6, Stop.FINISHED)


async def test_lanes_do_not_change_what_is_sent() -> None:
    """One lane and five lanes send the same multiset of requests, and the digest says so; a salt changes it."""
    sent = []
    digests = []
    for plan in (replace(PLAN, lanes=1), replace(PLAN, lanes=5), replace(PLAN, salt="x")):
        async with FakeServer() as server:
            log = await play(server, agent_sessions(5), plan)
        sent.append(sorted(json.dumps(body, sort_keys=True) for body in server.bodies))
        digests.append(log.request_digest)
    assert sent[0] == sent[1] != sent[2]
    assert digests[0] == digests[1] != digests[2]


async def test_measured_hit_rate_of_an_endless_cache_is_the_ideal_less_page_rounding() -> None:
    """Sent one by one to a server that forgets nothing, each request misses the ideal by a page at most."""
    async with FakeServer() as server:
        log = await play(server, agent_sessions(4, turns=12), replace(PLAN, lanes=1))
    report = summarise(log)
    assert report.hit_ratio.measured is not None
    # Pages lose up to 16 tokens a request and the last one is computed; the ideal loses under 7 words itself.
    slack = (PAGE_TOKENS + 1) * report.requests / report.tokens.prompt
    assert report.hit_ratio.ideal - slack <= report.hit_ratio.measured <= report.hit_ratio.ideal + slack / 2
    assert report.hit_ratio.ideal > 0.8


async def test_usage_and_ranks_are_summed_exactly() -> None:
    """Tokens per rank are the sums over the requests that its headers name."""
    async with FakeServer(rank_of=lambda number: ("w0", number % 2)) as server:
        log = await play(server, [growing_session(8)], replace(PLAN, scale_tokens=Fraction(1)))
    report = summarise(log)
    # Turn k has 128(k+1) words in 1 system, k+1 user and k assistant messages of 4 tokens each.
    prompt = [128 * (k + 1) + 4 * (2 * k + 2) for k in range(8)]
    assert [body["max_tokens"] for body in server.bodies] == [64] * 8
    assert (report.tokens.prompt, report.tokens.completion) == (sum(prompt), 8 * 64)
    assert [(rank.name, rank.requests, rank.prompt_tokens) for rank in report.ranks] == [
        ("w0/0", 4, sum(prompt[::2])),
        ("w0/1", 4, sum(prompt[1::2])),
    ]
    # All of the prompt before is there, in whole pages.
    cached = [0] + [p // PAGE_TOKENS * PAGE_TOKENS for p in prompt[:-1]]
    assert report.tokens.cached == sum(cached)
    assert report.ranks[0].uncached_tokens == sum(prompt[::2]) - sum(cached[::2])
    assert report.hit_ratio.expected == report.hit_ratio.measured
    assert report.reasons == {"home": 8}


async def test_each_kind_of_trouble_is_counted_as_what_it_is() -> None:
    """Refusals, resets before and amid the stream, error frames, nonsense and silence are told apart, exactly."""
    faults = {
        1: Fault.REFUSE_429,
        3: Fault.RESET_MIDWAY,
        4: Fault.ERROR_FRAME,
        6: Fault.BAD_CHUNK,
        7: Fault.SILENCE,
        9: Fault.REFUSE_500,
        11: Fault.RESET_MIDWAY,
    }
    async with FakeServer(fault=faults.get) as server:
        log = await play(server, [growing_session(14)], replace(PLAN, lanes=1), silence_seconds=1.5)
        await until(lambda: server.disconnects == 1)
    report = summarise(log)
    assert report.requests == len(server.bodies) == 14
    assert report.errors_by_kind == {
        "failed": 1, "frame": 1, "protocol": 1, "pushback": 1, "reset": 2, "timeout": 1,
    }  # fmt: skip
    assert report.errors == 7
    assert report.first_token_seconds.count == 7
    assert report.error_examples["frame"] == "the engine broke"
    assert report.error_examples["pushback"] == "HTTP 429: refused 1"


async def test_a_rejected_turn_ends_its_conversation_only() -> None:
    """After HTTP 400, as for a context too long, the later and longer turns are not sent; other sessions go on."""
    async with FakeServer(fault=lambda number: Fault.REFUSE_400 if number == 2 else None) as server:
        log = await play(server, [growing_session(6, name="a"), growing_session(4, name="b")], replace(PLAN, lanes=1))
    assert summarise(log).errors_by_kind == {"rejected": 1}
    assert [exchange.session for exchange in log.exchanges] == ["a"] * 3 + ["b"] * 4


async def test_a_reset_before_any_answer_on_a_new_connection_is_an_error() -> None:
    """The first request on a connection is not sent again."""
    async with FakeServer(fault=lambda number: Fault.RESET_BEFORE if number == 0 else None) as server:
        log = await play(server, [growing_session(3)], replace(PLAN, lanes=1))
    assert summarise(log).errors_by_kind == {"reset": 1}
    assert len(server.bodies) == 3


async def test_a_request_that_crosses_a_closing_connection_is_sent_again() -> None:
    """A kept connection that breaks under the next request before a byte of answer costs a resend, not an error."""
    async with FakeServer(fault=lambda number: Fault.RESET_BEFORE if number == 2 else None) as server:
        log = await play(server, [growing_session(3)], replace(PLAN, lanes=1))
    assert summarise(log).errors == 0
    assert len(log.exchanges) == 3
    assert len(server.bodies) == 4
    assert server.bodies[2] == server.bodies[3]


async def test_a_kept_connection_that_has_died_is_replaced_unseen() -> None:
    """A server that closes after each answer, unannounced, causes no error, and a live one keeps its connection."""
    async with FakeServer(fault=lambda number: Fault.CLOSE_AFTER if number < 4 else None) as server:
        log = await play(server, [growing_session(8)], replace(PLAN, lanes=1))
    assert summarise(log).errors == 0
    assert len(server.bodies) == 8
    assert server.connections == 5


async def test_first_token_and_token_times_are_what_the_server_waited() -> None:
    """A first token after 120 ms and 30 ms between tokens are measured as such; the empty role chunk is no token."""
    session = growing_session(1)
    async with FakeServer(first_token_seconds=0.12, token_seconds=0.03) as server:
        log = await play(server, [session], replace(PLAN, scale_tokens=Fraction(1, 8)))
    report = summarise(log)
    total_seconds = log.exchanges[0].answer.total_seconds
    assert 0.12 <= report.first_token_seconds.p50 < total_seconds - 0.15
    assert report.inter_token_seconds.count == 7  # eight tokens
    assert 0.029 <= report.inter_token_seconds.p50 < (total_seconds - 0.12) / 4  # four are no shorter


async def test_the_parent_waits_for_joined_subagents_and_not_for_others() -> None:
    """The turn after a spawn is sent after the joined child's last answer; a background child only keeps the lane."""
    joined = Subagent("joined", Conversation((Turn((range(500, 502),), 502, 128, 256),)))
    background = Subagent(
        "background",
        Conversation(tuple(Turn((range(700, 702 + n),), 702 + n, 128 + 64 * n, 256) for n in range(4))),
        is_joined=False,
    )
    session = growing_session(2, subagents=(joined, background))
    async with FakeServer(token_seconds=0.01) as server:
        log = await play(server, [session, growing_session(1, name="next")], replace(PLAN, lanes=1))
    ended = {(e.session, e.agent, e.turn): e.sent_seconds + e.answer.total_seconds for e in log.exchanges}
    sent = {(e.session, e.agent, e.turn): e.sent_seconds for e in log.exchanges}
    assert sent["s", "", 1] >= ended["s", "joined", 0]
    assert sent["s", "", 1] < ended["s", "background", 3]
    assert sent["next", "", 0] >= ended["s", "background", 3]


async def test_gaps_are_capped_then_scaled() -> None:
    """A recorded gap of 1,000 s under a cap of 30 s at 1/100 is 0.3 s of waiting."""
    session = growing_session(2)
    slow = replace(session.main.turns[1], gap_seconds=1000.0)
    session = replace(session, main=replace(session.main, turns=(session.main.turns[0], slow)))
    async with FakeServer() as server:
        log = await play(server, [session], replace(PLAN, scale_time=Fraction(1, 100), gap_cap_seconds=30.0))
    first, second = log.exchanges
    assert 0.29 < second.sent_seconds - first.sent_seconds - first.answer.total_seconds < 5


async def test_stopping_cuts_what_is_in_flight_and_reports_what_was_done() -> None:
    """At the end of the duration open requests are closed, counted as cut, and no error."""
    async with FakeServer(fault=lambda number: Fault.SILENCE if number >= 2 else None) as server:
        log = await play(server, [growing_session(9)], replace(PLAN, lanes=1, max_seconds=1.5))
        await until(lambda: server.disconnects == 1)
    report = summarise(log)
    assert log.stopped is Stop.DURATION
    assert (report.requests, report.cancelled, report.errors) == (3, 1, 0)
    assert log.duration_seconds < 15  # no silence was waited out


async def test_the_error_budget_ends_the_run() -> None:
    """With a budget of 10 % the third error among the first twenty requests is one too many."""
    async with FakeServer(fault=lambda _: Fault.REFUSE_500) as server:
        log = await play(server, [growing_session(9)], replace(PLAN, lanes=1, error_budget_ratio=0.1))
    assert log.stopped is Stop.ERROR_BUDGET
    assert summarise(log).errors == 3


async def test_warm_start_sends_one_primer_of_one_token_then_begins_in_the_middle() -> None:
    """The turn before the start is sent with max_tokens 1 and left out of the numbers."""
    async with FakeServer() as server:
        log = await play(server, [growing_session(20)], replace(PLAN, lanes=1, warm_start=True))
    report = summarise(log)
    primer, *others = log.exchanges
    assert report.warmup_requests == 1
    assert primer.is_warmup
    assert server.bodies[0]["max_tokens"] == 1
    assert 5 <= primer.turn + 1 <= 15
    assert [e.turn for e in others] == list(range(primer.turn + 1, 20))
    assert report.requests == len(others)
    assert others[0].answer.usage is not None
    assert (others[0].answer.usage.cached_tokens or 0) > 0


async def test_live_output_quotes_the_server_where_recorded_text_stood() -> None:
    """The assistant messages are the server's words; without the option they never are."""
    async with FakeServer() as server:
        await play(server, [growing_session(3)], replace(PLAN, live_output=True))
        live = server.bodies[-1]["messages"]
        await play(server, [growing_session(3)])
        recorded = server.bodies[-1]["messages"]
    assert [m["content"] for m in live if m["role"] == "assistant"] == [" live0 live1"] * 2
    assert all("live" not in m["content"] for m in recorded)
    assert [m["role"] for m in live] == [m["role"] for m in recorded]


@pytest.mark.parametrize(
    ("profile", "main", "child"),
    [
        (ClientProfile.AIPERF, {"x-correlation-id", "x-session-affinity"}, {"x-dynamo-parent-session-id"}),
        (ClientProfile.CLAUDE_CODE, {"x-claude-code-session-id"}, {"x-claude-code-agent-id"}),
        (ClientProfile.CODEX, {"session-id", "thread-id"}, {"x-codex-parent-thread-id"}),
        (ClientProfile.OPENCODE, {"x-session-id", "x-session-affinity"}, {"x-parent-session-id"}),
        (ClientProfile.NONE, set(), set()),
    ],
)
async def test_sessions_are_named_as_each_client_does(profile: ClientProfile, main: set[str], child: set[str]) -> None:
    """The main conversation sends the client's session headers, a subagent its own on top, and no one else's."""
    subagent = Subagent("a", Conversation((Turn((range(900, 902),), 902, 128, 64),)))
    async with FakeServer() as server:
        await play(server, [growing_session(1, subagents=(subagent,))], replace(PLAN, profile=profile))
    plain = {"host", "user-agent", "content-type", "content-length"}
    assert set(server.headers[0]) - plain == main
    assert set(server.headers[1]) - plain == main | child
    assert ("prompt_cache_key" in server.bodies[0]) == (profile is ClientProfile.CODEX)


async def test_sixty_four_lanes_keep_their_connections() -> None:
    """Sixty-four lanes open at most sixty-four connections for hundreds of requests."""
    sessions = [growing_session(6, name=f"s{number}") for number in range(80)]
    async with FakeServer(first_token_seconds=0.005) as server:
        log = await play(server, sessions, replace(PLAN, lanes=64))
    assert summarise(log).errors == 0
    assert len(server.bodies) == 480
    assert server.connections <= 64


async def _command(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import sys; from loadtest.cli import main; sys.exit(main(sys.argv[1:]))",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


async def test_the_command_writes_json_and_compares(tmp_path: Path) -> None:
    """Two runs of one seed write reports with equal digests, and the comparison shows both."""
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, lanes in zip(paths, ("1", "3"), strict=True):
        async with FakeServer(rank_of=lambda number: ("w0", number % 2)) as server:
            process = await _command(
                "--url", server.url, "--sessions", "2", "--turns", "3", "--scale-time", "0", "--scale-tokens", "1/64",
                "--lanes", lanes, "--json", str(path), "--label", path.stem, "--records", str(tmp_path / "records"),
            )  # fmt: skip
            output, _ = await process.communicate()
        assert process.returncode == 0
        assert "hit rate, ideal" in output.decode()
        assert len((tmp_path / "records").read_text().splitlines()) == len(server.bodies)
    first, second = (json.loads(path.read_text()) for path in paths)
    assert first["request_digest"] == second["request_digest"]
    assert first["requests"] == second["requests"] == len(server.bodies)
    assert set(first["hit_ratio"]) == {"measured", "ideal", "expected"}
    process = await _command("--compare", *map(str, paths))
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert "did not send the same" not in output.decode()


async def test_ctrl_c_reports_what_was_done() -> None:
    """An interrupted run prints its report as JSON, closes its requests and exits with 130."""
    silent: Callable[[int], Fault | None] = lambda number: Fault.SILENCE if number >= 3 else None  # noqa: E731
    async with FakeServer(fault=silent) as server:
        process = await _command("--url", server.url, "--sessions", "1", "--scale-time", "0", "--json", "-")
        async with asyncio.timeout(60):
            await server.received(4)
        process.send_signal(signal.SIGINT)
        output, _ = await asyncio.wait_for(process.communicate(), 30)
        await until(lambda: server.disconnects == 1)
    report = json.loads(output)
    assert process.returncode == 130
    assert report["stopped"] == "interrupted"
    assert (report["requests"], report["cancelled"], report["errors"]) == (4, 1, 0)


async def test_nobody_at_the_address_is_said_plainly() -> None:
    """Without a server the command names the address, asks whether it runs, and exits with 1."""
    async with FakeServer() as server:
        url = server.url
    process = await _command("--url", url, "--sessions", "1")
    _, errors = await process.communicate()
    assert process.returncode == 1
    assert f"{url.removeprefix('http://')} does not answer" in errors.decode()


async def test_a_server_that_wants_a_key_is_said_to() -> None:
    """The option that gives one is named."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        process = await _command("--url", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "--sessions", "1")
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert errors.decode().endswith(
        "answered HTTP 401 without a list of models; give a key that it takes with --api-key\n"
    )


async def test_few_requests_that_fail_are_a_failure_too() -> None:
    """Too few for the run to be cut short; the share of errors decides its status."""
    async with FakeServer(fault=lambda _: Fault.REFUSE_400) as server:
        process = await _command("--url", server.url, "--sessions", "1", "--turns", "1", "--no-subagents")
        _, told = await process.communicate()
    assert process.returncode == 1
    assert "1 errors in 1 requests; --error-budget 0.1 allows no more" in told.decode()


async def test_a_report_that_cannot_be_written_in_the_end_is_shown_all_the_same() -> None:
    """A full disk, say, costs the file and not what was measured: one sentence, and no traceback."""
    async with FakeServer() as server:
        process = await _command(
            *("--url", server.url, "--sessions", "1", "--turns", "1", "--no-subagents", "--json", "/dev/full")
        )
        shown, told = await process.communicate()
    assert process.returncode == 1
    assert "request digest" in shown.decode()
    assert told.decode().splitlines()[-1].startswith("homing replay: ")
    assert "No space left" in told.decode()
