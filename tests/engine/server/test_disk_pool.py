"""The disk's copies outlive the process: what is read back is what was stored under that name, or nothing."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from engine_shim.cache.copies import Copies
from engine_shim.cache.events import EventRecorder
from engine_shim.cache.labels import Kept, Label, root_digest
from engine_shim.cache.transfers import Place
from engine_shim.offload.disk import DiskPool
from engine_shim.types import CacheGroup, CacheLayout, GroupKind
from router.wire.block_keys import block_keys, namespace_seed

PAGE = bytes(range(200))
STATE = PAGE[:50]
MODEL = b"m" * 16
LAYOUT = CacheLayout(2, (CacheGroup(0, GroupKind.FULL, (0,)), CacheGroup(1, GroupKind.STATE, (1,))), (8, 4))


def open_pool(folder: Path, *, fingerprint: bytes = MODEL, pages: Sequence[int] = (8, 4)) -> DiskPool:
    """Pages of two tokens in two groups."""
    return DiskPool(folder, fingerprint=fingerprint, page_tokens=2, page_bytes=[len(PAGE), len(STATE)], pages=pages)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskPool]:
    disk = open_pool(tmp_path / "new")
    yield disk
    disk.close()


def labels(tokens: Sequence[int], namespace: str = "") -> list[Label]:
    """Of each page of a chain."""
    chain, before = [], root_digest(namespace)
    for at in range(0, len(tokens), 2):
        chain.append(Label(namespace, before, tuple(tokens[at : at + 2])))
        before = chain[-1].digest
    return chain


def names(tokens: Sequence[int], namespace: str = "") -> list[int]:
    return block_keys(tokens, block_tokens=2, parent=namespace_seed(namespace))


def put(disk: DiskPool, tokens: Sequence[int], slots: Sequence[int], *, group: int = 0, namespace: str = "") -> None:
    """A chain's pages, from its start on, each with contents that tell its slot."""
    for slot, label, name in zip(slots, labels(tokens, namespace), names(tokens, namespace), strict=False):
        contents = PAGE if group == 0 else STATE
        disk.store(group, slot, name, contents[slot:] + contents[:slot], label=label)


def again(disk: DiskPool, **options: object) -> tuple[DiskPool, Kept]:
    """The next process."""
    folder = disk._folder
    disk.close()
    disk = open_pool(folder, **options)
    return disk, disk.kept()


def told(kept: Kept) -> set[tuple[str, tuple[int, ...], int, int]]:
    """(namespace, all tokens up to a page's end, group, slot) of each copy."""
    copies, paths = set(), {None: ()}
    for page in kept.pages:
        paths[page] = paths[page.parent] + page.label.tokens
        copies.update((page.label.namespace, paths[page], group, slot) for group, slot in page.slots.items())
    return copies


def test_pages_come_back(disk: DiskPool) -> None:
    """Each slot of each group by itself, rewritten ones as last written, under their own names only."""
    put(disk, range(14), range(1, 8))
    put(disk, (5, 6), [3], group=1)
    keys = names(range(14))
    assert disk.load(0, 7, keys[6]) == PAGE[7:] + PAGE[:7]
    assert disk.load(0, 2, keys[0]) is None
    put(disk, (5, 6), [2])
    assert disk.load(0, 2, names((5, 6))[0]) == PAGE[2:] + PAGE[:2]
    assert disk.load(0, 2, keys[1]) is None
    assert disk.load(1, 3, names((5, 6))[0]) == STATE[3:] + STATE[:3]
    assert disk.load(0, 4, 0) is None


def test_the_next_process_finds_them(disk: DiskPool) -> None:
    """Chains that fork, two namespaces, two groups: what is told is what was stored, and it can be read."""
    put(disk, (1, 2, 3, 4, 5, 6), [5, 1, 2])
    put(disk, (1, 2, 3, 4, 9, 9), [5, 1, 3])
    put(disk, (1, 2), [7], namespace="tenant")
    disk.store(1, 2, names((1, 2, 3, 4))[1], STATE, label=labels((1, 2, 3, 4))[1])
    disk, kept = again(disk)
    assert told(kept) == {
        ("", (1, 2), 0, 5),
        ("", (1, 2, 3, 4), 0, 1),
        ("", (1, 2, 3, 4), 1, 2),
        ("", (1, 2, 3, 4, 5, 6), 0, 2),
        ("", (1, 2, 3, 4, 9, 9), 0, 3),
        ("tenant", (1, 2), 0, 7),
    }
    assert kept.refused == {}
    assert disk.load(1, 2, names((1, 2, 3, 4))[1]) == STATE
    assert disk.load(0, 3, names((1, 2, 3, 4, 9, 9))[2]) == PAGE[3:] + PAGE[:3]
    disk.close()


def test_what_is_of_no_use_is_refused_and_deleted(disk: DiskPool) -> None:
    """Another model's pages, slots that there are no more, chains with a gap, halves of files; each is counted."""
    put(disk, (1, 2, 3, 4, 5, 6), [1, 2, 3])
    put(disk, (7, 8), [4])
    put(disk, (9, 9), [7])
    folder = disk._folder
    (folder / "0-2.page").write_bytes((folder / "0-2.page").read_bytes()[:-1])
    (folder / "0-5.page").write_text("not a page")
    (folder / "0-6.page").write_bytes((folder / "0-4.page").read_bytes())
    (folder / "1-1.page").write_bytes((folder / "0-4.page").read_bytes())
    (folder / "0-4.new").write_bytes(b"unfinished")
    (folder / "notes.txt").write_text("somebody else's")
    disk, kept = again(disk, pages=(7, 4))
    assert told(kept) == {("", (1, 2), 0, 1), ("", (7, 8), 0, 4)}
    assert kept.refused == {"damaged": 3, "excess": 1, "orphan": 1, "twin": 1}
    assert {path.name for path in folder.iterdir()} == {"0-1.page", "0-4.page", "lock", "notes.txt"}
    disk, kept = again(disk, fingerprint=b"another model...")
    assert (kept.pages, kept.refused) == ((), {"foreign": 2})
    assert {path.name for path in folder.iterdir()} == {"lock", "notes.txt"}
    disk.close()


def test_odd_things_under_a_pages_name(disk: DiskPool, tmp_path: Path) -> None:
    """Pipes, links and names that only look like numbers: nothing waits, follows or fails, and the rest is found."""
    put(disk, (1, 2), [2])
    folder, victim = disk._folder, tmp_path / "victim"
    victim.write_text("precious")
    os.mkfifo(folder / "0-1.page")
    os.mkfifo(folder / "0-1.new")
    (folder / "0-3.page").symlink_to(victim)
    (folder / "0-4.page").symlink_to(tmp_path / "nothing")
    (folder / "0-5.new").symlink_to(victim)
    (folder / "0-6.page").symlink_to(folder / "0-2.page")
    others = ["00-02.page", "0-٣.page", "0-0.page", "notes.new"]
    for name in others:
        (folder / name).write_bytes((folder / "0-2.page").read_bytes())
    (folder / "lost+found").mkdir()
    disk, kept = again(disk)
    assert told(kept) == {("", (1, 2), 0, 2)}
    assert kept.refused == {"damaged": 4}
    left = {path.name for path in folder.iterdir()}
    assert left == {"0-2.page", "lock", "lost+found", *others}
    assert victim.read_text() == "precious"
    put(disk, (1, 2, 3, 4), [2, 1])
    assert disk.load(0, 1, names((1, 2, 3, 4))[1]) == PAGE[1:] + PAGE[:1]
    disk.close()


def test_a_pipe_in_place_of_a_page_is_a_miss(disk: DiskPool) -> None:
    """Also while the process runs, and with somebody at its other end who writes nothing."""
    put(disk, (1, 2), [1])
    path = disk._folder / "0-1.page"
    path.unlink()
    os.mkfifo(path)
    writer = os.open(path, os.O_RDWR)
    assert disk.load(0, 1, names((1, 2))[0]) is None
    os.close(writer)


@pytest.mark.parametrize("name", ["0-1.page", "0-9.new"])
def test_a_directory_where_a_page_should_be(disk: DiskPool, name: str) -> None:
    """Is refused in a sentence, with what is in it left as it is; once it is gone the folder is free to be used."""
    disk.close()
    (disk._folder / name / "inner").mkdir(parents=True)
    with pytest.raises(OSError, match=rf"{name} is a directory, where a page's file should be$"):
        open_pool(disk._folder)
    assert (disk._folder / name / "inner").is_dir()
    (disk._folder / name / "inner").rmdir()
    (disk._folder / name).rmdir()
    open_pool(disk._folder).close()


def test_what_was_written_last_is_kept_longest(disk: DiskPool) -> None:
    """Across processes as within one: the path least recently written goes first, its end before its start.

    A start counts as written when the last of what hangs on it was, as no end can do without.
    """
    written = {}
    for tokens, slots, seconds in [((1, 2, 3, 4), (1, 2), (100, 400)), ((1, 2, 5, 6), (1, 3), (100, 300))]:
        put(disk, tokens, slots)
        written.update(zip(slots, seconds, strict=True))
    put(disk, (7, 8, 9, 9), (4, 5))
    written.update({4: 150, 5: 200})
    for slot, seconds in written.items():
        os.utime(disk._folder / f"0-{slot}.page", (seconds, seconds))
    disk, kept = again(disk)
    copies = Copies({Place.DISK: (8, 4)}, page_tokens=2, events=EventRecorder(LAYOUT))
    copies.adopt(kept.pages)
    new = copies.grow("", tuple(range(20, 34)), names(range(20, 34)))
    went = []
    for page in new:
        before = {copy.slot for copy in copies.shelves[Place.DISK].order[0]}
        reserved = copies.reserve(page, Place.DISK, 0)
        went += [reserved.slot] if reserved.slot in before else []
    assert went == [5, 4, 3, 2, 1]
    disk.close()


def test_any_changed_byte_is_a_miss(disk: DiskPool) -> None:
    """In header and contents alike, read at once or by the next process, and the other pages are as before."""
    put(disk, (1, 2, 3, 4), [1, 2])
    path = disk._folder / "0-2.page"
    sound = path.read_bytes()
    first, second = names((1, 2, 3, 4))
    for at in range(len(sound)):
        path.write_bytes(sound[:at] + bytes([sound[at] ^ 1]) + sound[at + 1 :])
        assert disk.load(0, 2, second) is None, at
        disk, kept = again(disk)
        assert disk.load(0, 2, second) is None, at
        assert told(kept) - {("", (1, 2, 3, 4), 0, 2)} == {("", (1, 2), 0, 1)}
    assert disk.load(0, 1, first) == PAGE[1:] + PAGE[:1]
    disk.close()


def test_a_name_alone_is_no_proof(disk: DiskPool) -> None:
    """A page whose 64-bit name is another's, as somebody may make on purpose, still hangs where its chain leads."""
    put(disk, (1, 2), [1])
    put(disk, (3, 4), [2])
    (name,), (label,) = names((3, 4)), labels((3, 4))
    child = Label("", label.digest, (5, 6))
    disk.store(0, 1, name, PAGE, label=labels((1, 2))[0])
    disk.store(0, 3, 99, PAGE, label=child)
    disk, kept = again(disk)
    assert told(kept) == {("", (1, 2), 0, 1), ("", (3, 4), 0, 2), ("", (3, 4, 5, 6), 0, 3)}
    disk.close()


def test_a_folder_is_for_one_process_and_its_owner(disk: DiskPool) -> None:
    """A second one is refused while the first lives; nobody else may look at what users wrote."""
    put(disk, (1, 2), [1])
    folder = disk._folder
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    with pytest.raises(OSError, match="in use by another process"):
        open_pool(folder)
    disk.wipe()
    assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        open_pool(tmp_path / "file" / "below")


WRITER = """
import itertools, sys
from pathlib import Path
sys.path[:0] = sys.argv[2:]
from test_disk_pool import open_pool, put
disk = open_pool(Path(sys.argv[1]))
print("ready", flush=True)
for turn in itertools.count():
    put(disk, (turn % 5, 2, 3, 4, 5, 6, 7, turn % 3), [1 + turn % 4, 5, 6, 7])
"""


def test_a_process_killed_in_the_middle_of_a_write(tmp_path: Path) -> None:
    """Ten times: whatever is told afterwards can be read and is whole, and nothing unfinished is left."""
    folder, read = tmp_path / "pool", 0
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[3])]
    for turn in range(10):
        with subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder), *paths], stdout=subprocess.PIPE, text=True
        ) as writer:
            assert writer.stdout.readline() == "ready\n"
            time.sleep(0.01 + 0.007 * turn)
            writer.send_signal(signal.SIGKILL)
        disk = open_pool(folder)
        kept = disk.kept()
        assert set(kept.refused) <= {"orphan", "twin"}
        for page in kept.pages:
            path = page.label.tokens
            above = page.parent
            while above is not None:
                path, above = above.label.tokens + path, above.parent
            for group, slot in page.slots.items():
                assert disk.load(group, slot, names(path)[-1]) == PAGE[slot:] + PAGE[:slot]
                read += 1
        assert not any(name.endswith(".new") for name in os.listdir(folder))
        disk.close()
    assert read > 20
