"""What goes to Redis and over its channel is read back as it was, and nothing else is believed."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.errors import WireError
from router.wire.redis import (
    Farewell,
    Home,
    Homes,
    Loads,
    Names,
    RankWork,
    WorkerEntry,
    WorkersChanged,
    decode_news,
    encode_news,
    read_home,
    read_workers,
    session_digest,
)

COUNT = st.integers(0, 2**40)
SECONDS = st.floats(0, 1e9)
HOME = st.builds(Home, st.binary(min_size=16, max_size=16), st.text(), COUNT, COUNT, SECONDS)
WORK = st.builds(RankWork, st.text(), COUNT, COUNT, COUNT, COUNT, COUNT, SECONDS, SECONDS, SECONDS)
NEWS = st.one_of(
    st.builds(Homes, st.text(), st.lists(HOME)),
    st.builds(Loads, st.text(), st.lists(WORK)),
    st.builds(WorkersChanged, st.text()),
    st.builds(Farewell, st.text()),
)


@given(NEWS)
def test_news_is_read_as_it_was_told(news: Homes | Loads | WorkersChanged | Farewell) -> None:
    """All kinds."""
    assert decode_news(encode_news(news)) == news


@given(st.binary())
def test_no_bytes_but_news_are_read(message: bytes) -> None:
    """Either they are news, or a ``WireError``."""
    with contextlib.suppress(WireError):
        assert encode_news(decode_news(message))


@pytest.mark.parametrize("load", [(-1, 0.0), (0, -1.0), (0, float("nan")), (0, float("inf"))])
def test_load_that_no_rank_can_have_is_no_news(load: tuple[int, float]) -> None:
    """It would spoil the prices."""
    inflight, waiting_seconds = load
    work = ["w", 0, inflight, 0, 0, 0, waiting_seconds, 0.0, 0.0]
    with pytest.raises(WireError):
        decode_news(msgspec.msgpack.encode(["loads", "replica", [work]]))


def test_news_of_an_unknown_kind_is_no_news() -> None:
    """A later version may tell more."""
    with pytest.raises(WireError):
        decode_news(msgspec.msgpack.encode(["weather", "replica", 1]))


def test_a_session_s_digest_depends_on_each_of_its_names() -> None:
    """And on where one ends and the next begins, and on whose home it is; half a surrogate pair is no obstacle."""
    names = [
        ("m", "t", "s", ""),
        ("m", "t", "s", "a"),
        ("m", "t", "sa", ""),
        ("m", "ts", "", ""),
        ("mt", "s", "", ""),
        ("m", "t", "\ud800", ""),
    ]
    digests = [session_digest(*each) for each in names]
    assert len({*digests, *(session_digest(*each, is_prefill=True) for each in names)}) == 2 * len(names)
    assert {len(digest) for digest in digests} == {16}
    assert session_digest("m", "t", "s", "") == digests[0]


def test_keys_lie_below_the_prefix() -> None:
    """So that groups of replicas can use one Redis."""
    names = Names("mine")
    assert names.home(b"\x01\xff") == "mine:home:01ff"
    assert {names.news, names.workers} == {"mine:news", "mine:workers"}


def test_a_home_is_read_with_its_age() -> None:
    """5,000 ms - 2,000 ms; a worker's name may hold a slash or a space."""
    assert read_home(b"d", b"2000 123 a/b c/7", now_ms=5000) == Home(b"d", "a/b c", 7, 123, 3.0)
    assert read_home(b"d", b"9000 1 w/0", now_ms=5000).age_seconds == 0.0


@pytest.mark.parametrize("value", [b"", b"1 2", b"x 2 w/0", b"1 x w/0", b"1 2 w/x", b"1 2 w", b"\xff 2 w/0"])
def test_a_damaged_home_is_an_error(value: bytes) -> None:
    """Never a guess."""
    with pytest.raises(WireError):
        read_home(b"d", value, now_ms=5000)


@pytest.mark.parametrize("reply", [[b"w"], [b"w", b"1"], [1, 2, 3]])
def test_a_damaged_list_of_workers_is_an_error(reply: list[bytes]) -> None:
    """Never a guess."""
    with pytest.raises(WireError):
        read_workers(reply)


@pytest.mark.parametrize(
    ("entry", "name"),
    [
        ([b"a\xff", b"1", b"r"], r"a\xff"),
        ([b"bad", b"x", b"r"], "bad"),
        ([b"bad", b"1", b"\xff"], "bad"),
    ],
)
def test_a_worker_that_cannot_be_read_hides_no_other(entry: list[bytes], name: str) -> None:
    """It stands there by a name that can be printed; whose own name that is keeps it."""
    good = WorkerEntry("r", 7)
    assert read_workers([b"v", b"7", b"r", *entry, b"w", b"7", b"r"]) == {"v": good, name: None, "w": good}
    for reply in ([name.encode(), b"7", b"r", b"a\xff", b"1", b"r"], [b"a\xff", b"1", b"r", name.encode(), b"7", b"r"]):
        assert read_workers(reply)[name] == good
