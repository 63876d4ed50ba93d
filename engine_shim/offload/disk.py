"""The disk's copies: a file for each page, which outlives the process and says what it is.

::

    FOLDER/lock                  held while a process uses the folder
    FOLDER/GROUP-SLOT.page       magic "HPG2" | xxh3-64 of the rest of the header | fingerprint 16 | group u16
                                 | namespace bytes u32 | tokens u32 | contents bytes u64 | block key u64
                                 | digest of the chain before the page 16 | xxh3-128 of the contents
                                 | namespace | tokens u32 each | contents
    FOLDER/GROUP-SLOT.new        one that is being written

A file comes into being by a rename, so it is whole or not there, however the process ends; what a power cut leaves of
one fails its checksum. The *fingerprint* is the model's, its weights and numbers and how pages are cut: what another
has left is refused, and so is a page whose chain is not complete. There are never more files than slots.

Whatever else lies in the folder is left alone, but what has a page's name and is no file is deleted like a damaged one.
Only a directory of such a name is more than that: it keeps the pool from opening.

The contents are what users wrote, as keys and values, and their tokens: nobody but the owner can look in.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
import struct
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from engine_shim.cache.labels import Kept, KeptPage, Label, root_digest
from router.wire.block_keys import TOKEN_BYTES, pack_tokens

FINGERPRINT_BYTES = 16
_MAGIC = b"HPG2"
_CHECK = struct.Struct("<4sQ")
_FIELDS = struct.Struct("<16sHIIQQ16s16s")
_FILE = re.compile(r"(0|[1-9][0-9]*)-([1-9][0-9]*)\.(page|new)")


@dataclass(frozen=True, slots=True)
class _Header:
    """Of one file: all but its contents."""

    fingerprint: bytes
    group: int
    name: int
    label: Label
    contents_bytes: int
    checksum: bytes

    def pack(self) -> bytes:
        namespace, tokens = self.label.namespace.encode(), self.label.tokens
        fields = _FIELDS.pack(
            self.fingerprint,
            self.group,
            len(namespace),
            len(tokens),
            self.contents_bytes,
            self.name,
            self.label.parent,
            self.checksum,
        )
        rest = b"".join((fields, namespace, pack_tokens(tokens)))
        return _CHECK.pack(_MAGIC, xxhash.xxh3_64_intdigest(rest)) + rest

    @classmethod
    def read(cls, file: int) -> _Header | None:
        """From the start of a file; None if that is not a header. Leaves the file at its contents."""
        start = os.read(file, _CHECK.size + _FIELDS.size)
        if len(start) < _CHECK.size + _FIELDS.size:
            return None
        magic, check = _CHECK.unpack_from(start)
        fields = _FIELDS.unpack_from(start, _CHECK.size)
        fingerprint, group, namespace_bytes, tokens, contents_bytes, name, parent, checksum = fields
        if magic != _MAGIC or namespace_bytes + TOKEN_BYTES * tokens > os.fstat(file).st_size:
            return None
        tail = os.read(file, namespace_bytes + TOKEN_BYTES * tokens)
        if xxhash.xxh3_64_intdigest(start[_CHECK.size :] + tail) != check:
            return None
        label = Label(tail[:namespace_bytes].decode(), parent, tuple(array("I", tail[namespace_bytes:])))
        return cls(fingerprint, group, name, label, contents_bytes, checksum)


class DiskPool:
    """Slots in a folder. ``page_bytes[g]`` is the size of a page of group g, ``pages[g]`` how many slots it has.

    ``fingerprint`` is of whatever decides what a page of ``page_tokens`` tokens contains. Raises ``OSError`` where the
    folder cannot be made, another process uses it or a page cannot be written for a directory of its name. Only one
    thread at a time calls it.
    """

    def __init__(
        self, folder: Path, *, fingerprint: bytes, page_tokens: int, page_bytes: Sequence[int], pages: Sequence[int]
    ) -> None:
        assert len(fingerprint) == FINGERPRINT_BYTES
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        self._folder = folder
        self._fingerprint = fingerprint
        self._page_tokens = page_tokens
        self._page_bytes = tuple(page_bytes)
        self._pages = tuple(pages)
        self._lock = os.fdopen(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "rb")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock.close()
            raise OSError(f"{folder} is in use by another process") from error
        for path, _ in self._files():
            if path.is_dir() and not path.is_symlink():
                self._lock.close()
                raise OSError(f"{path} is a directory, where a page's file should be")

    def store(self, group: int, slot: int, name: int, contents: bytes, *, label: Label) -> None:
        """Write a page in place of what the slot has. Raises ``OSError``, for one where the disk is full."""
        checksum = xxhash.xxh3_128_digest(contents)
        header = _Header(self._fingerprint, group, name, label, len(contents), checksum).pack()
        path = self._path(group, slot)
        unfinished = path.with_suffix(".new")
        file = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(file, "wb", buffering=0) as stream:
                for part in (header, contents):
                    if stream.write(part) != len(part):
                        raise OSError(f"{unfinished} could not be written to its end")
            unfinished.rename(path)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def load(self, group: int, slot: int, name: int) -> bytes | None:
        """Read a page; None if it is not there, whole and the right one."""
        with self._open(self._path(group, slot)) as file:
            header = None if file is None else _Header.read(file)
            if file is None or header is None or self._fault(header, group) or header.name != name:
                return None
            contents = os.read(file, header.contents_bytes)
            return contents if xxhash.xxh3_128_digest(contents) == header.checksum else None

    def kept(self) -> Kept:
        """What is usable of that which earlier processes have left; deletes the rest. Looks at no contents yet."""
        refused: Counter[str] = Counter()
        found: dict[bytes, KeptPage] = {}
        for path, match in self._files():
            if match[3] == "new":
                path.unlink()
                continue
            fault = self._find(path, int(match[1]), int(match[2]), found)
            if fault is not None:
                refused[fault] += 1
                path.unlink()
        pages = _linked(found)
        for page in found.keys() - {page.label.digest for page in pages}:
            for group, slot in found[page].slots.items():
                refused["orphan"] += 1
                self._path(group, slot).unlink()
        return Kept(tuple(pages), dict(refused))

    def wipe(self) -> None:
        """Delete every page."""
        for path, _ in self._files():
            path.unlink()

    def close(self) -> None:
        """Leave the folder, and what is in it, to the next process."""
        self._lock.close()

    def _files(self) -> list[tuple[Path, re.Match[str]]]:
        """What has a page's name, sorted by that."""
        matches = [(path, _FILE.fullmatch(path.name)) for path in sorted(self._folder.iterdir())]
        return [(path, match) for path, match in matches if match]

    def _find(self, path: Path, group: int, slot: int, found: dict[bytes, KeptPage]) -> str | None:
        """Enter a file among what was ``found``, by digest; or say why not."""
        if group >= len(self._pages) or slot >= self._pages[group]:
            return "excess"
        with self._open(path) as file:
            header = None if file is None else _Header.read(file)
            if file is None or header is None:
                return "damaged"
            fault = self._fault(header, group)
            if fault is not None:
                return fault
            state = os.fstat(file)
            if state.st_size != os.lseek(file, 0, os.SEEK_CUR) + header.contents_bytes:
                return "damaged"
        page = found.setdefault(header.label.digest, KeptPage(header.label, None))
        if group in page.slots:
            return "twin"
        page.slots[group] = slot
        page.written_seconds = max(page.written_seconds, state.st_mtime)
        return None

    def _fault(self, header: _Header, group: int) -> str | None:
        if header.fingerprint != self._fingerprint:
            return "foreign"
        sizes = (header.group, len(header.label.tokens), header.contents_bytes)
        return None if sizes == (group, self._page_tokens, self._page_bytes[group]) else "damaged"

    @contextlib.contextmanager
    def _open(self, path: Path) -> Iterator[int | None]:
        """A regular file; None for anything else, for one a pipe, at which an ordinary open waits for a writer."""
        try:
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            yield None
            return
        try:
            yield file if stat.S_ISREG(os.fstat(file).st_mode) else None
        finally:
            os.close(file)

    def _path(self, group: int, slot: int) -> Path:
        return self._folder / f"{group}-{slot}.page"


def _linked(found: dict[bytes, KeptPage]) -> list[KeptPage]:
    """The pages that a whole chain leads to, parents before children."""
    children: dict[bytes, list[KeptPage]] = {}
    for page in found.values():
        children.setdefault(page.label.parent, []).append(page)
    roots = {root_digest(page.label.namespace) for page in found.values()}
    linked: list[KeptPage] = []
    for digest in roots:
        linked += children.get(digest, [])
    for page in linked:  # which grows on the way
        for child in children.get(page.label.digest, []):
            child.parent = page
            linked.append(child)
    return linked
