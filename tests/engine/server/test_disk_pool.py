"""The disk's copies: what is read back is what was stored under that name, or nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from engine_shim.offload.disk import DiskPool

PAGE = bytes(range(200))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskPool]:
    disk = DiskPool(tmp_path / "new", page_bytes=[len(PAGE), 50], pages=[8, 4])
    yield disk
    disk.close()


def test_pages_come_back(disk: DiskPool) -> None:
    """Each slot of each group by itself, rewritten ones as last written."""
    for slot in range(1, 8):
        disk.store(0, slot, 1000 + slot, PAGE[slot:] + PAGE[:slot])
    disk.store(1, 3, 77, PAGE[:50])
    disk.store(0, 2, 9, PAGE)
    assert disk.load(0, 2, 9) == PAGE
    assert disk.load(0, 2, 1002) is None
    assert disk.load(0, 7, 1007) == PAGE[7:] + PAGE[:7]
    assert disk.load(1, 3, 77) == PAGE[:50]


def test_never_written_is_a_miss(disk: DiskPool) -> None:
    assert disk.load(0, 4, 0) is None


@pytest.mark.parametrize("at", [0, 5, 9, 17, 20, 34, 150, 233])
def test_any_changed_byte_is_a_miss(disk: DiskPool, at: int) -> None:
    """Magic, group, length, name, checksum and contents alike; the other slots are as before."""
    disk.store(0, 1, 5, PAGE)
    disk.store(0, 2, 6, PAGE)
    start = disk._offset(0, 1)
    byte = os.pread(disk._file, 1, start + at)
    os.pwrite(disk._file, bytes([byte[0] ^ 1]), start + at)
    assert disk.load(0, 1, 5) is None
    assert disk.load(0, 2, 6) == PAGE


def test_a_cut_file_is_a_miss(disk: DiskPool) -> None:
    disk.store(0, 1, 5, PAGE)
    os.ftruncate(disk._file, disk._offset(0, 1) + 100)
    assert disk.load(0, 1, 5) is None


def test_it_leaves_nothing_behind(disk: DiskPool, tmp_path: Path) -> None:
    """The file has no name, so not even a killed process leaves one."""
    disk.store(0, 1, 5, PAGE)
    assert list((tmp_path / "new").iterdir()) == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        DiskPool(tmp_path / "file" / "below", page_bytes=[1], pages=[2])
