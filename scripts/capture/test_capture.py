"""Tests of the parts that need no emulator: python3 scripts/capture/test_capture.py"""

import os
import struct
import sys
import tempfile
import unittest
import zlib
from pathlib import Path

sys.dont_write_bytecode = True
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "lib"))

import frames
import image
import layout
from common import CaptureError
from emulated.basics import GIB, MIB, PAGE_BYTES, parse_size

MTREE = """\
FlatView #0\r
 AS "memory", root: system\r
  0000000000000000-00000000000bffff (prio 0, ram): ram0\r
  00000000000c0000-00000000000dffff (prio 1, rom): pc.rom\r
  00000000000e0000-00000000000fffff (prio 0, rom): pc.bios @0000000000020000\r
  0000000000100000-000000007fffffff (prio 0, ram): ram0 @0000000000100000\r
  00000000fffc0000-00000000ffffffff (prio 0, rom): pc.bios\r
  0000000100000000-000000027fffffff (prio 0, ram): ram0 @0000000080000000\r
"""
IOMEM = """\
00001000-0009fbff : System RAM
00100000-7ffdbfff : System RAM
100000000-27fffffff : System RAM
"""


def frame(kind, payload, damage=0):
    """A frame as guest.c sends it."""
    head = struct.pack("<8sQQ", frames.MAGIC, kind, len(payload))
    return head + payload + struct.pack("<I", zlib.crc32(payload) ^ damage)


def look(runs, counted=None):
    """The payload of a look."""
    counted = sum(pages for _, pages in runs) if counted is None else counted
    return struct.pack("<QQQ", counted, counted, len(runs)) + b"".join(struct.pack("<QQ", *run) for run in runs)


class Sizes(unittest.TestCase):
    """Sizes on the command line."""

    def test_units(self):
        self.assertEqual([parse_size(text) for text in ("0", "4k", "512M", "8G")], [0, 4096, 512 * MIB, 8 * GIB])

    def test_nonsense(self):
        for text in ("", "G", "-1G", "1.5G", "8T"):
            with self.assertRaises(ValueError, msg=text):
                parse_size(text)


class Layout(unittest.TestCase):
    """The regions, and free pages in RAM order."""

    def setUp(self):
        self.regions = layout.from_mtree(MTREE, 8 * GIB)

    def test_two_regions_with_what_lies_under_rom(self):
        found = [(r.start, r.bytes, r.offset) for r in self.regions]
        self.assertEqual(found, [(0, 2 * GIB, 0), (4 * GIB, 6 * GIB, 2 * GIB)])

    def test_no_ram_in_the_map(self):
        with self.assertRaises(CaptureError):
            layout.from_mtree(MTREE.replace("ram0", "ram1"), 8 * GIB)

    def test_guest_agrees(self):
        layout.check_against_guest(self.regions, IOMEM)

    def test_guest_disagrees(self):
        for wrong in (IOMEM.replace("27fffffff", "28fffffff"), IOMEM.replace("27fffffff", "25fffffff"), "nothing"):
            with self.assertRaises(CaptureError, msg=wrong):
                layout.check_against_guest(self.regions, wrong)

    def test_bits_close_the_hole(self):
        above = 4 * GIB // PAGE_BYTES
        low = 2 * GIB // PAGE_BYTES
        runs = [(3, 2), (13, 22), (low - 1, 1), (above, 1), (above + 9, 1)]
        expected = {3, 4, *range(13, 35), low - 1, low, low + 9}
        bits = layout.free_bits(self.regions, runs)
        self.assertEqual(bits, sum(1 << page for page in expected))

    def test_run_outside_ram(self):
        for run in ((2 * GIB // PAGE_BYTES - 1, 2), (3 * GIB // PAGE_BYTES, 1), (10 * GIB // PAGE_BYTES, 1)):
            with self.assertRaises(CaptureError, msg=run):
                layout.free_bits(self.regions, [run])


class Frames(unittest.TestCase):
    """What comes over the serial line."""

    def setUp(self):
        self.reader = frames.Reader()

    def test_byte_by_byte(self):
        got = []
        for byte in frame(1, b"text") + frame(2, look([(1, 2), (9, 4000)])):
            self.reader.feed(bytes([byte]))
            got += filter(None, [self.reader.next_frame()])
        self.assertEqual(got[0], (1, "text"))
        self.assertEqual((got[1][1].runs, got[1][1].pages), ([(1, 2), (9, 4000)], 4002))

    def test_refused(self):
        refused = {
            "damaged": frame(1, b"text", damage=1),
            "no magic": b"x" * 64,
            "too long": struct.pack("<8sQQ", frames.MAGIC, 1, 1 << 40),
            "unknown kind": frame(7, b""),
            "no head": frame(2, b"1234"),
            "run count": frame(2, look([(1, 2)]) + b"12345678"),
            "overlapping runs": frame(2, look([(1, 4), (3, 4)])),
            "empty run": frame(2, look([(1, 0)])),
            "only heads of free blocks": frame(2, look([(1, 2)], counted=100_000)),
        }
        for why, data in refused.items():
            reader = frames.Reader()
            reader.feed(data)
            with self.assertRaises(CaptureError, msg=why):
                reader.next_frame()


class Image(unittest.TestCase):
    """The three files."""

    PAGES = 1027

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.bytes = self.PAGES * PAGE_BYTES
        with open(self.folder / "source", "wb") as file:
            file.truncate(self.bytes)
            for page, fill in ((0, b"a"), (1, b"\0"), (512, b"b"), (1026, b"c")):
                os.pwrite(file.fileno(), fill * PAGE_BYTES, page * PAGE_BYTES)
        with open(self.folder / "source", "rb") as file:
            self.copied = image.copy_sparse(file.fileno(), self.folder / image.RAM, self.bytes)
        image.write_map_and_layout(self.folder, 1 << 512 | 1 << 600, [layout.Region(0, self.bytes, 0)], self.PAGES)

    def test_copy_is_the_same_and_keeps_holes(self):
        self.assertEqual((self.folder / image.RAM).read_bytes(), (self.folder / "source").read_bytes())
        self.assertEqual(self.copied, 4 * PAGE_BYTES)
        self.assertEqual((self.folder / image.RAM).stat().st_blocks, (self.folder / "source").stat().st_blocks)

    def test_figures(self):
        found = image.examine(self.folder)
        expected = {
            "pages": 1027, "free_pages": 2, "used_pages": 1025, "free_runs": 2, "present_pages": 4, "present_runs": 3,
            "used_present_pages": 3, "used_nonzero_pages": 2, "used_nonzero_runs": 2, "free_nonzero_pages": 1,
        }
        self.assertEqual({name: found[name] for name in expected}, expected)

    def test_contradictions(self):
        with open(self.folder / image.FREE, "r+b") as file:
            file.seek(128)
            file.write(b"\x08")  # the bit after the last page
        with self.assertRaises(CaptureError):
            image.examine(self.folder)
        os.truncate(self.folder / image.FREE, 128)
        with self.assertRaises(CaptureError):
            image.examine(self.folder)
        os.truncate(self.folder / image.RAM, self.bytes - PAGE_BYTES)
        with self.assertRaises(CaptureError):
            image.examine(self.folder)
        (self.folder / image.LAYOUT).write_text("[]")
        with self.assertRaises(CaptureError):
            image.examine(self.folder)


if __name__ == "__main__":
    unittest.main()
