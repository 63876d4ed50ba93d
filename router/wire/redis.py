"""What replicas of the router share, as it lies in Redis and goes over its channel: names, scripts, records.

- home of a session: string ``<prefix>:home:<digest>`` = ``<used ms> <prompt tokens> <worker>/<rank>``; ends after its
  idle time; where prompts are computed apart, the prefill rank is a home of its own, under another digest;
- workers: hash ``<prefix>:workers``, field = name, value = ``<acted ms> <until ms> <record>``; ends with its lease;
- news (homes, loads, farewells): channel ``<prefix>:news``, MessagePack; nothing is kept.

Times in Redis are Redis's own, in milliseconds; replicas tell ages, so their clocks need not agree. The newest wins.
A session is known by the digest of its names: what clients send never becomes a key or a value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import msgspec
import xxhash

from router.errors import WireError

Count = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e10)]


@dataclass(frozen=True, slots=True)
class Names:
    """Key and channel names below one prefix."""

    prefix: str

    @property
    def news(self) -> str:
        """The channel."""
        return f"{self.prefix}:news"

    @property
    def workers(self) -> str:
        """The hash of workers."""
        return f"{self.prefix}:workers"

    def home(self, digest: bytes) -> str:
        """The key of a session's home."""
        return f"{self.prefix}:home:{digest.hex()}"


def session_digest(model: str, tenant: str, session: str, agent: str, *, is_prefill: bool = False) -> bytes:
    """16 bytes that stand for a session of a model, or for what of it the prefill ranks do."""
    names = (model, tenant, session, agent, *(("prefill",) if is_prefill else ()))
    return xxhash.xxh3_128_digest("\x00".join(names).encode("utf-8", "surrogatepass"))


# --- scripts ---------------------------------------------------------------------------------------


class Script(NamedTuple):
    """A Lua script and the name under which Redis caches it."""

    text: str
    sha: str


def _script(text: str) -> Script:
    return Script(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


#: KEYS: homes. ARGV: idle ms, then for each key its age in ms and the rest of its value. A newer home stays.
BIND = _script("""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i, key in ipairs(KEYS) do
  local age = tonumber(ARGV[2 * i])
  local left = tonumber(ARGV[1]) - age
  local old = redis.pcall('GET', key)
  if type(old) ~= 'string' then old = nil end
  if left > 0 and not (old and (tonumber(string.match(old, '^%d+')) or 0) > now - age) then
    redis.call('SET', key, string.format('%d %s', now - age, ARGV[2 * i + 1]), 'PX', left)
  end
end
""")

#: KEYS[1]: workers. ARGV: lease ms of a worker, lease ms of a removal, then name, stamp, age, record for each. A stamp
#: of -1 is made here from the age. Of two entries the one with the later stamp stays; of one stamp, the first. An empty
#: record is a removal. Returns name, stamp, record for each that is alive.
WORKERS = _script("""
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
for i = 3, #ARGV, 4 do
  local name, stamp, record = ARGV[i], tonumber(ARGV[i + 1]), ARGV[i + 3]
  if stamp < 0 then stamp = now - tonumber(ARGV[i + 2]) end
  local old = redis.call('HGET', KEYS[1], name)
  if old then
    local acted, until_, kept = string.match(old, '^(%d+) (%d+) (.*)$')
    if acted and tonumber(until_) > now and tonumber(acted) >= stamp then
      if tonumber(acted) > stamp then record = nil else record = kept end
    end
  end
  if record then
    local lease = record == '' and ARGV[2] or ARGV[1]
    redis.call('HSET', KEYS[1], name, string.format('%d %d %s', stamp, now + tonumber(lease), record))
  end
end
local alive = {}
local all = redis.call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  local acted, until_, record = string.match(all[i + 1], '^(%d+) (%d+) (.*)$')
  if acted and tonumber(until_) > now then
    alive[#alive + 1] = all[i]
    alive[#alive + 1] = acted
    alive[#alive + 1] = record
  else
    redis.call('HDEL', KEYS[1], all[i])
  end
end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return alive
""")


# --- homes -------------------------------------------------------------------------------------------


class Home(msgspec.Struct, frozen=True, array_like=True):
    """Where a session is at home, and how long ago it was used there. ``prompt_tokens``: its prompt then."""

    digest: bytes
    worker: str
    rank: Count
    prompt_tokens: Count
    age_seconds: Seconds


def bind_arguments(homes: Iterable[Home], *, idle_seconds: float) -> list[str | int]:
    """ARGV of ``BIND``."""
    arguments: list[str | int] = [int(idle_seconds * 1000)]
    for home in homes:
        arguments += (max(0, int(home.age_seconds * 1000)), f"{home.prompt_tokens} {home.worker}/{home.rank}")
    return arguments


def read_home(digest: bytes, value: bytes, *, now_ms: int) -> Home:
    """A home from its key's value. Raises ``WireError``."""
    try:
        used_ms, prompt_tokens, name = value.decode().split(" ", 2)
        worker, _, rank = name.rpartition("/")
        return Home(digest, worker, int(rank), int(prompt_tokens), max(0.0, (now_ms - int(used_ms)) / 1000))
    except ValueError as error:
        raise WireError(f"the home of a session in Redis cannot be read: {error}") from error


# --- workers ------------------------------------------------------------------------------------------


class WorkerEntry(NamedTuple):
    """What was last done with a worker: registered as ``record`` tells, or removed (empty).

    ``stamp_ms`` is Redis's time of it, or None for one that Redis has not been told, ``age_seconds`` ago.
    """

    record: str
    stamp_ms: int | None
    age_seconds: float = 0.0


def workers_arguments(
    entries: Mapping[str, WorkerEntry], *, lease_seconds: float, removal_seconds: float
) -> list[str | int]:
    """ARGV of ``WORKERS``."""
    arguments: list[str | int] = [int(lease_seconds * 1000), int(removal_seconds * 1000)]
    for name, entry in entries.items():
        stamp_ms = -1 if entry.stamp_ms is None else entry.stamp_ms
        arguments += (name, stamp_ms, max(0, int(entry.age_seconds * 1000)), entry.record)
    return arguments


def read_workers(reply: Sequence[bytes]) -> dict[str, WorkerEntry | None]:
    """The answer of ``WORKERS``; None for an entry that cannot be read. Raises ``WireError`` for no such answer."""
    entries: dict[str, WorkerEntry | None] = {}
    try:
        for name, stamp, record in zip(reply[::3], reply[1::3], reply[2::3], strict=True):
            try:
                entries[name.decode()] = WorkerEntry(record.decode(), int(stamp))
            except ValueError:
                entries.setdefault(name.decode(errors="backslashreplace"), None)
    except (ValueError, AttributeError) as error:
        raise WireError(f"the workers in Redis cannot be read: {error}") from error
    return entries


# --- news ---------------------------------------------------------------------------------------------


class RankWork(msgspec.Struct, frozen=True, array_like=True):
    """What one replica has sent to one rank and not seen finished; fields as in ``core.types.RankLoad``.

    ``served_seconds`` ago the rank began with the prompt it works on; ``recent_seconds`` and ``lasting_seconds`` are
    faded to now; ``charged_tokens`` are those of the contexts that the replica has admitted to the rank.
    """

    worker: str
    rank: Count
    inflight: Count
    inflight_tokens: Count
    waiting: Count
    waiting_tokens: Count
    waiting_seconds: Seconds
    served_seconds: Seconds
    recent_seconds: Seconds
    charged_tokens: Count = 0
    serving_seconds: Seconds = 0.0
    lasting_seconds: Seconds = 0.0


class Charged(msgspec.Struct, frozen=True, array_like=True):
    """With how many ``tokens`` a replica charges a session on a rank and will not once another serves it: 0 while its
    requests are in flight. None: it charges it there no more.
    """

    digest: bytes
    worker: str
    rank: Count
    tokens: Count | None


class Homes(msgspec.Struct, frozen=True, array_like=True, tag="homes"):
    """Sessions that a replica has sent somewhere."""

    replica: str
    homes: list[Home]


class Loads(msgspec.Struct, frozen=True, array_like=True, tag="loads"):
    """All the work of a replica, told again and again: it is also the sign that the replica lives. ``charges`` are
    those that have changed since it last told; all of them, if ``is_whole``.
    """

    replica: str
    ranks: list[RankWork]
    charges: list[Charged] = []
    is_whole: bool = False


class WorkersChanged(msgspec.Struct, frozen=True, array_like=True, tag="workers"):
    """A replica has entered something in the hash of workers."""

    replica: str


class Farewell(msgspec.Struct, frozen=True, array_like=True, tag="farewell"):
    """A replica stops in good order."""

    replica: str


News = Homes | Loads | WorkersChanged | Farewell

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[News] = msgspec.msgpack.Decoder(News)


def encode_news(news: News) -> bytes:
    """One message of the channel."""
    return _encoder.encode(news)


def decode_news(message: bytes) -> News:
    """Read one message. Raises ``WireError``, also for kinds of news this version does not know."""
    try:
        return _decoder.decode(message)
    except msgspec.DecodeError as error:
        raise WireError(f"news from another replica cannot be read: {error}") from error
