"""Who is asking: names of headers and fields as the clients send them."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from router.core.session import MAX_ID_CHARS, conversation_head, identify
from router.core.types import SessionKey

UUID = "0b0c7f4e-93a5-4c6e-9a1a-1f2e3d4c5b6a"

#: From the strongest signal to the weakest: the order of the documentation, written out once more by hand.
SIGNALS: tuple[tuple[str, Mapping[str, str], Mapping[str, object]], ...] = (
    ("configured", {"x-my-company": "configured"}, {}),
    ("homing", {"x-homing-session-id": "homing"}, {}),
    ("dynamo", {"x-dynamo-session-id": "dynamo"}, {}),
    ("smg", {"x-smg-routing-key": "smg"}, {}),
    ("claude", {"x-claude-code-session-id": "claude"}, {}),
    ("codex-thread", {"thread-id": "codex-thread"}, {}),
    ("codex", {"session-id": "codex"}, {}),
    ("codex-old", {"session_id": "codex-old"}, {}),
    ("opencode", {"x-session-affinity": "opencode"}, {}),
    ("vllm", {"x-session-id": "vllm"}, {}),
    ("opencode-gateway", {"x-opencode-session": "opencode-gateway"}, {}),
    ("goose", {"agent-session-id": "goose"}, {}),
    ("cline", {"x-task-id": "cline"}, {}),
    ("grok", {"x-grok-conv-id": "grok"}, {}),
    ("litellm", {"x-litellm-session-id": "litellm"}, {}),
    ("litellm-trace", {"x-litellm-trace-id": "litellm-trace"}, {}),
    ("aiperf", {"x-correlation-id": "aiperf"}, {}),
    ("cache-key", {}, {"prompt_cache_key": "cache-key"}),
    ("sglang", {}, {"session_id": "sglang"}),
    ("conversation", {}, {"conversation_id": "conversation"}),
    ("params", {}, {"session_params": {"session_id": "params"}}),
    ("metadata", {}, {"metadata": {"session_id": "metadata"}}),
    ("smg-turn", {}, {"rid": "smg-turn_t12_r3"}),
    ("user", {}, {"user": "user"}),
)


def named(headers: Mapping[str, str], fields: Mapping[str, object] | None = None, **options: object) -> str | None:
    """The session's id alone."""
    key = identify(headers, fields or {}, tenant="t", **options)  # type: ignore[arg-type]
    return key.session if key is not None else None


@pytest.mark.parametrize(("name", "headers", "fields"), SIGNALS, ids=[signal[0] for signal in SIGNALS])
def test_each_signal_names_the_session_alone(
    name: str, headers: Mapping[str, str], fields: Mapping[str, object]
) -> None:
    """Every header and field that a client is known to send is recognised."""
    assert named(headers, fields, first=("x-my-company",)) == name


@pytest.mark.parametrize("place", range(len(SIGNALS)))
def test_the_stronger_signal_wins(place: int) -> None:
    """With a signal and all weaker ones present, in whatever order they were sent, the strongest decides."""
    headers: dict[str, str] = {}
    fields: dict[str, object] = {}
    for _, more_headers, more_fields in reversed(SIGNALS[place:]):
        headers |= more_headers
        fields |= more_fields

    assert named(headers, fields, first=("x-my-company",)) == SIGNALS[place][0]


def test_configured_names_are_compared_without_case() -> None:
    """An operator writes a header as it is documented; it arrives in lower case."""
    assert named({"x-my-company": "7"}, first=("X-My-Company",)) == "7"


@pytest.mark.parametrize(
    "header",
    [
        *("authorization", "Cookie", "x-api-key", "api-key", "proxy-authorization", "x-goog-api-key", "x-auth-token"),
        *("x-api-token", "x-amz-security-token", "ocp-apim-subscription-key", "x-client-secret", "x-password"),
        # In the form of a vendor's session header:
        *(
            "x-auth-session-id",
            "x-secret-session-id",
            "x-sso-session-id",
            "x-corp-sso-session-id",
            "x-login-session-id",
            "x-pwd-session-id",
        ),
        *("x_sso_session", "saml_session_id", "X-Corp_Login"),
    ],
)
def test_credentials_name_nobody(header: str) -> None:
    """Not by themselves and not when an operator asks for it."""
    headers = {header.lower(): "Bearer sk-secret"}

    assert named(headers) is None
    assert named(headers, first=(header,)) is None
    assert named({**headers, "x-session-id": "s"}, first=(header,)) == "s"


def test_headers_of_others_name_nobody() -> None:
    """Ids of one request, and the parent's session, are not this session's name."""
    strangers = {
        "x-request-id": "1",
        "x-dynamo-parent-session-id": "2",
        "x-parent-session-id": "3",
        "x-session-id-hint": "4",
        "x-claude-code-parent-agent-id": "5",
        "traceparent": "6",
        "x-user-id": "7",
        "x-dynamo-session-final": "true",
    }

    assert identify(strangers, {}, tenant="t") is None


def test_a_name_that_only_sounds_like_a_credentials_is_one_of_a_session() -> None:
    """A lesson has an s, an s and an o."""
    assert named({"x-lesson-session-id": "s"}) == "s"


def test_a_user_of_many_conversations_names_none_of_them() -> None:
    """Their heads tell them apart; where everybody has one conversation, an operator may say so."""
    headers = {"x-user-id": "u"}
    one, two = (named(headers, chat(*START[:1], ("user", text))) for text in ("a", "b"))
    assert one != two
    assert named(headers, first=("x-user-id",)) == "u"


@pytest.mark.parametrize(
    "rid", ["8d7f", "_t1", "s_t", "s_t1x", "s_x1", 7, ["s_t1", "s_t2"], "s" * 1000 + "_t1", "_t1" * 500_000]
)
def test_an_id_of_one_request_names_no_session(rid: object) -> None:
    """Only one that says which turn of a session it is."""
    assert named({}, {"rid": rid}) is None
    assert named({}, {"rid": rid, "user": "u"}) == "u"


def test_the_turns_of_a_session_have_one_name() -> None:
    """Each is tried again under an id of its own."""
    assert {named({}, {"rid": rid}) for rid in ("a_b_t1", "a_b_t2", "a_b_t2_r1", "a_b_r10")} == {"a_b"}


def test_an_empty_signal_is_no_signal() -> None:
    """A client that sends a blank id has none."""
    assert named({"x-session-id": "", "x-correlation-id": "c"}) == "c"
    assert named({}, {"prompt_cache_key": "", "session_id": "", "user": "u"}) == "u"


def test_a_subagent_of_claude_code_is_another_session() -> None:
    """Its agent id stands beside the session's, whichever signal named that, and whoever its parent is."""
    main = {"x-claude-code-session-id": UUID}
    agent = {**main, "x-claude-code-agent-id": "a1"}

    assert identify(main, {}, tenant="t") == SessionKey("t", UUID, "")
    assert identify(agent, {}, tenant="t") == SessionKey("t", UUID, "a1")
    for parent in ("x-parent-session-id", "x-dynamo-parent-session-id"):
        for headers in ({**agent, parent: "p"}, {parent: "p", **agent}):
            assert identify(headers, {}, tenant="t") == SessionKey("t", UUID, "a1")


@pytest.mark.parametrize("parent", ["x-dynamo-parent-session-id", "x-parent-session-id", "x-codex-parent-thread-id"])
def test_a_conversation_with_a_parent_is_a_subagent_of_its_own_name(parent: str) -> None:
    """Its own id names it, whatever the parent's is; the parent itself is nobody's child."""
    assert identify({"x-session-id": "c", parent: "p"}, {}, tenant="t") == SessionKey("t", "c", "child of p")
    assert identify({"x-session-id": "p", parent: ""}, {}, tenant="t") == SessionKey("t", "p", "")


@pytest.mark.parametrize(
    "user_id",
    [
        f"user_5f1c_account_77_session_{UUID}",
        f"user_5f1c_account__session_{UUID}",
        f'{{"device_id":"d","account_uuid":"a","session_id":"{UUID}"}}',
    ],
    ids=["old", "old-without-account", "json"],
)
def test_claude_codes_user_id_holds_a_session(user_id: str) -> None:
    """Gateways drop its headers, so the session is read from ``metadata.user_id``, old form and new."""
    assert named({}, {"metadata": {"user_id": user_id}, "user": "weaker"}) == UUID


@pytest.mark.parametrize(
    "user_id", ["plain", "{", "{}", "[1]", '{"session_id": 7}', "user_session_", "{" + "[" * 200_000]
)
def test_a_user_id_without_a_session_is_passed_over(user_id: str) -> None:
    """A user is no session: many conversations share it."""
    assert named({}, {"metadata": {"user_id": user_id}}) is None


@pytest.mark.parametrize(
    ("headers", "fields"),
    [
        ({"x-session-id": "s"}, {}),
        ({}, {"prompt_cache_key": "s"}),
        ({}, {"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]}),
    ],
    ids=["header", "field", "head"],
)
def test_tenants_are_apart(headers: Mapping[str, str], fields: Mapping[str, object]) -> None:
    """Two tenants may use one id, and begin with the same words."""
    one, two = (identify(headers, fields, tenant=tenant) for tenant in ("a", "b"))
    assert one is not None
    assert two is not None
    assert (one.tenant, two.tenant) == ("a", "b")
    assert one.session == two.session


def test_long_ids_are_bounded_and_still_different() -> None:
    """A megabyte of id costs the table a hash; equal ids stay equal, others apart."""
    exact, long, other = "x" * MAX_ID_CHARS, "x" * 1_000_000, "x" * 999_999 + "y"

    assert named({"x-session-id": exact}) == exact
    names = [named({"x-session-id": value}) or "" for value in (long, other, long)]
    assert names[0] == names[2] != names[1]
    assert max(map(len, names)) <= MAX_ID_CHARS
    agent = identify({"x-session-id": "s", "x-claude-code-agent-id": long}, {}, tenant="t")
    assert agent is not None
    assert len(agent.agent) <= MAX_ID_CHARS


@pytest.mark.parametrize("value", ["a\x00b", "a\nb", "\ud800", "\ud800" * 1000])
def test_ids_that_cannot_be_printed_are_hashed(value: str) -> None:
    """What reaches logs, rings and the admin plane is printable and has an encoding."""
    name = named({}, {"prompt_cache_key": value})

    assert name is not None
    assert name.isprintable()
    assert name.encode()


# --- conversations without a name ----------------------------------------------------------------


def chat(*turns: tuple[str, object]) -> dict[str, object]:
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


START = (("system", "You are helpful."), ("user", "Hello"))


def test_a_keyless_conversation_keeps_its_name_over_its_turns() -> None:
    """What follows the first user message does not matter."""
    first = identify({}, chat(*START), tenant="t")
    later = identify({}, chat(*START, ("assistant", "Hi!"), ("user", "And now?")), tenant="t")

    assert first is not None
    assert first == later


@pytest.mark.parametrize(
    "other",
    [
        (("system", "You are helpful."), ("user", "Hello!")),
        (("system", "You are rude."), ("user", "Hello")),
        (("user", "You are helpful."), ("user", "Hello")),
        (("system", "You are helpful.Hello"), ("user", "")),
        (("system", ""), ("user", "You are helpful.Hello")),
    ],
)
def test_conversations_with_other_heads_have_other_names(other: tuple[tuple[str, object], ...]) -> None:
    """Text, role and the border between messages count."""
    assert conversation_head(chat(*other)) != conversation_head(chat(*START))


def test_parts_and_text_are_read() -> None:
    """A list of text parts differs by its texts."""
    one, two = ([{"type": "text", "text": text}] for text in ("a", "b"))

    assert conversation_head(chat(("user", one))) == conversation_head(chat(("user", one), ("assistant", "x")))
    assert conversation_head(chat(("user", one))) != conversation_head(chat(("user", two)))


@pytest.mark.parametrize("as_part", [False, True])
def test_a_billing_line_does_not_rename_the_conversation(as_part: bool) -> None:
    """Claude Code's first system line changes every turn and is left out of the name."""

    def system(checksum: str) -> object:
        line = f"x-anthropic-billing-header: cc_version=2.1.15.1f2; cc_entrypoint=cli; cch={checksum};"
        if as_part:
            return [{"type": "text", "text": line}, {"type": "text", "text": "You are Claude Code."}]
        return f"{line}\nYou are Claude Code."

    heads = {conversation_head(chat(("system", system(checksum)), START[1])) for checksum in ("00000", "fa690")}
    other = conversation_head(chat(("system", "You are somebody else."), START[1]))

    assert len(heads) == 1
    assert heads != {other}


@pytest.mark.parametrize("place", range(3))
def test_a_billing_line_counts_nowhere_in_a_text(place: int) -> None:
    """A gateway may put lines of its own before it."""

    def system(checksum: str) -> str:
        lines = ["You are Claude Code.", "Be brief."]
        lines.insert(place, f"x-anthropic-billing-header: cch={checksum};")
        return "\n".join(lines)

    assert len({conversation_head(chat(("system", system(checksum)), START[1])) for checksum in ("00", "fa690")}) == 1


@pytest.mark.parametrize(
    "fields",
    [{}, {"prompt": "Once upon"}, {"messages": "hi"}, {"messages": []}, {"messages": [7]}, chat(("system", "only"))],
)
def test_without_a_user_message_nothing_names_the_conversation(fields: Mapping[str, object]) -> None:
    """A plain prompt or a broken list has no stable head."""
    assert identify({}, fields, tenant="t") is None


def nested(depth: int) -> object:
    value: object = "x"
    for _ in range(depth):
        value = [value]
    return value


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
) | st.just(nested(5000))


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    fields=st.fixed_dictionaries(
        {},
        optional={
            "prompt_cache_key": JUNK,
            "session_id": JUNK,
            "session_params": JUNK | st.fixed_dictionaries({"session_id": JUNK}),
            "metadata": JUNK | st.fixed_dictionaries({"session_id": JUNK, "user_id": JUNK}),
            "user": JUNK,
            "messages": JUNK
            | st.lists(
                st.fixed_dictionaries(
                    {"role": JUNK | st.just("user"), "content": JUNK | st.lists(st.fixed_dictionaries({"text": JUNK}))}
                )
            ),
        },
    )
)
def test_junk_never_raises(fields: dict[str, object]) -> None:
    """Whatever JSON a client sends, there is a bounded name or none."""
    key = identify({}, fields, tenant="t")

    assert key is None or (0 < len(key.session) <= MAX_ID_CHARS and key.session.encode())


# --- what a name costs ----------------------------------------------------------------------------


def test_of_a_long_text_the_ends_and_the_length_name_a_conversation() -> None:
    """A megabyte of system prompt is told from another by its beginning, its end and its size."""
    text = "word " * 200_000
    names = [
        conversation_head(chat(("system", system), ("user", "Hello")))
        for system in (text, text, f"a{text}", f"{text}a", text[:400_000] + text[400_005:], "word " * 199_999 + "wort ")
    ]
    assert names[0] == names[1]
    assert len(set(names)) == len(names) - 1


@pytest.mark.parametrize("words", [10, 200_000])
def test_a_volatile_line_counts_for_nothing_in_a_text_of_any_length(words: int) -> None:
    """Not even by how long it is."""
    rest = "word " * words
    names = {
        conversation_head(chat(("system", f"x-anthropic-billing-header: {'c' * size}\n{rest}"), ("user", "Hello")))
        for size in (0, 1, 100)
    }
    assert len(names) == 1


def test_a_conversation_whose_first_messages_are_no_users_has_no_name() -> None:
    """A thousand messages of the system are nobody's head."""
    assert conversation_head(chat(*[("system", "x")] * 1000, ("user", "Hello"))) is None


def test_a_user_id_is_read_up_to_its_bound() -> None:
    """A session stands at the end of it, or in a short object."""
    assert named({}, {"metadata": {"user_id": "u" * 1_000_000 + f"_session_{UUID}"}}) == UUID
    assert named({}, {"metadata": {"user_id": f'{{"a": "{"u" * 1_000_000}", "session_id": "{UUID}"}}'}}) is None
