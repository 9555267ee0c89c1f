"""What a sleeping process gives back: pages that a file can give it again, and no other."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from tidegate.web.worker import give_back, unchanged_maps

MAPS = """\
00400000-00500000 r-xp 00000000 08:01 11 /usr/lib/libcode.so
Size:               1024 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
00600000-00601000 r--p 00100000 08:01 11 /usr/lib/libcode.so
Size:                  4 kB
Anonymous:             4 kB
VmFlags: rd mr mw me
00700000-00701000 rw-p 00101000 08:01 11 /usr/lib/libcode.so
Size:                  4 kB
Anonymous:             0 kB
VmFlags: rd wr mr mw me
00800000-00900000 r--p 00000000 00:00 0
Size:               1024 kB
Anonymous:             0 kB
VmFlags: rd mr mw me
00a00000-00a01000 r--p 00000000 00:00 0 [vvar]
Size:                  4 kB
Anonymous:             0 kB
VmFlags: rd
00b00000-00b02000 r--p 00000000 08:01 12 /usr/lib/a name with blanks (deleted)
Size:                  8 kB
Anonymous:             0 kB
VmFlags: rd mr mw me
"""


def test_only_files_that_nobody_can_write_there_and_nobody_has_changed_are_given_back() -> None:
    """Relocated, writable and anonymous pages are nowhere else: to lose them would end the process, or change it."""
    assert list(unchanged_maps(MAPS)) == [(0x400000, 0x500000), (0xB00000, 0xB02000)]


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell")
def test_what_was_changed_in_memory_is_there_after_giving_back(tmp_path: Path) -> None:
    file = tmp_path / "pages"
    file.write_bytes(b"old" + bytes(3 * mmap.PAGESIZE))
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY) as private:
        private[:3] = b"new"
        give_back()
        assert private[:3] == b"new" and file.read_bytes()[:3] == b"old"
