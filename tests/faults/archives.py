"""Faults 28 to 30: archives that point outside their folder, grow without bounds, or are damaged."""

from __future__ import annotations

import io
import itertools
import shutil
import stat
import struct
import subprocess
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

from hostile_archives import BAD_ZIPS, END, REFUSED, SKIPPED, base256, entry, pax, record
from tar_files import packed, tar_bytes
from trees import files_of, leftovers

from colabkit.storage.sources import items
from colabkit.storage.sources.items import STAGE_SEAL

from .board import COLABKIT, Outcome, Result, attempts, fault, spread
from .mutations import cuts, flips, overwrites
from .tools import COPIERS, Copier

_MOST_BYTES = 16 << 20
"""Bytes that a bomb may write before it counts as extracted; every bomb here is larger."""


def _run(*words: str) -> Callable[[Path, Path], object]:
    def run(source: Path, target: Path) -> None:
        target.mkdir()
        subprocess.run([*words, str(source)], cwd=target, check=True, capture_output=True, timeout=30)

    return run


EXTRACTORS = {name: copier for name, copier in COPIERS.items() if {"zip", "tar"} & {*copier.kinds}}
EXTRACTORS[COLABKIT] = replace(EXTRACTORS[COLABKIT], kinds=("zip", "tar", "tar.gz", "tar.bz2", "tar.xz", "tar.zst"))
for _name, _command, _kinds in (("unzip", ("unzip", "-qo"), ("zip",)), ("tar", ("tar", "-xf"), ("tar", "tar.gz"))):
    if shutil.which(_name):
        EXTRACTORS[_name] = Copier(_run(*_command), _run(*_command), subprocess.CalledProcessError, _kinds)


def _zip(members: Mapping[str, bytes], method: int = zipfile.ZIP_DEFLATED, mode: int = 0) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, data in members.items():
            member = zipfile.ZipInfo(name)
            member.compress_type, member.external_attr = method, mode << 16
            archive.writestr(member, data)
    return buffer.getvalue()


def _extractions(
    copier: Copier,
    folder: Path,
    archives: Mapping[str, bytes],
    expected: Mapping[str, bytes],
    is_exact: bool = False,
) -> Iterator[Result]:
    """Extract archives, whose names end with their suffix after a colon, and score the results.

    An extracted folder must contain the files `expected`, except those that the report lists as skipped. If `is_exact`,
    it must contain no others.
    """
    outside = folder / "outside"
    if not outside.exists():
        outside.mkdir()
        (outside / "x").write_bytes(b"canary")
    numbers = itertools.count()

    def work(data: bytes, suffix: str) -> Outcome:
        # The parent of the target contains nothing else, so that any file written outside the target is found.
        place = folder / f"case{next(numbers)}"
        (place / "up" / "in").mkdir(parents=True)
        archive, target = place / f"a{suffix}", place / "up" / "in" / "target"
        archive.write_bytes(data)
        is_done, skipped = False, ()
        try:
            report = copier.copy(archive, target)
            is_done, skipped = True, getattr(report, "skipped", ())
            return _judged(target, expected, skipped, is_exact)
        finally:
            archive.unlink()
            inside = list(place.rglob("*"))
            written = sum(path.lstat().st_size for path in inside if path.is_file() and not path.is_symlink())
            odd = [path for path in inside if target not in path.parents and path not in (target, *target.parents)]
            remains = target.exists() or bool(leftovers(place))
            shutil.rmtree(place)
            assert not odd, f"files outside the folder: {odd[:3]}"
            assert files_of(outside) == {"x": b"canary"}, "a file outside the folder has changed"
            assert written <= _MOST_BYTES, f"{written} bytes were extracted"
            assert is_done or not remains, "unfinished files are left"

    cases = [(name, partial(work, data, name.rpartition(":")[2])) for name, data in _readable(copier, archives)]
    yield from attempts(cases, refusals=copier.refusals)


def _readable(copier: Copier, archives: Mapping[str, bytes]) -> list[tuple[str, bytes]]:
    return [(name, data) for name, data in archives.items() if name.rpartition(":.")[2] in copier.kinds]


def _judged(
    target: Path, expected: Mapping[str, bytes], skipped: tuple[tuple[str, str], ...], is_exact: bool
) -> Outcome:
    for path in target.rglob("*"):
        assert path.is_symlink() or path.is_file() or path.is_dir(), f"{path.name!r} is a special file"
        assert path.resolve().is_relative_to(target.resolve()), f"{path.name!r} is a link out of the folder"
    found = files_of(target)
    found.pop(STAGE_SEAL, None)
    lost = {name for name, data in expected.items() if found.get(name) != data}
    assert lost <= {name for name, _ in skipped}, f"files differ or are missing: {sorted(lost)[:3]}"
    assert not is_exact or found.keys() <= expected.keys(), "there are other files than in the archive"
    return Outcome.DEGRADED if skipped else Outcome.SURVIVED


def _escapes(outside: Path) -> dict[str, bytes]:
    """Return archives with members that point outside, links, special files, or members that exclude one another."""
    found = {}
    harmless = entry("first", b"1")
    tars = {**REFUSED, **{name: data for name, (data, _) in SKIPPED.items()}}
    tars["absolute path of a file"] = entry(f"{outside}/x"[:99], b"1")
    link = tarfile.TarInfo("link")
    link.type, link.linkname = tarfile.SYMTYPE, str(outside)
    tars["file below a link to a folder"] = link.tobuf(tarfile.GNU_FORMAT) + entry("link/x", b"1")
    link.type, link.linkname = tarfile.LNKTYPE, str(outside / "x")
    tars["hard link that is then written"] = link.tobuf(tarfile.GNU_FORMAT) + entry("link", b"1")
    for name, data in tars.items():
        for suffix in (".tar", ".tar.gz"):
            found[f"{name}:{suffix}"] = packed(harmless + data + END, suffix)
    names = [
        *("../x", "../../x", "a/../../x", "/x", f"{outside}/x", "..\\x", "C:\\x", "C:/x", "//host/x", "a/./../../x"),
        *("..", ".", "", "a/", "a\0b", "~/x", "$HOME/x", "-rf", "a" * 300, "a\nb", "\x1b[2Jx", "con", "x" + "/y" * 400),
    ]
    for name in names:
        found[f"{name[:20]!r}:.zip"] = _zip({"first": b"1", name: b"2"})
    modes = {"link": stat.S_IFLNK, "pipe": stat.S_IFIFO, "device": stat.S_IFBLK, "socket": stat.S_IFSOCK}
    for name, mode in modes.items():
        members = {"link": str(outside).encode(), "link/x": b"1"} if name == "link" else {"s": b"1"}
        found[f"{name}:.zip"] = _zip(members, mode=mode | 0o644)
    found["file and folder:.zip"] = _zip({"first": b"1", "a": b"1", "a/b": b"2"})
    return found


@fault(28, "archives with paths that lead outside, links and special files", EXTRACTORS)
def escapes(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    archives = _escapes(folder / "outside")
    kept = dict(spread(_readable(copier, archives), limit))
    with_first = {name: data for name, data in kept.items() if name not in _WITHOUT_FIRST}
    yield from _extractions(copier, folder, with_first, {"first": b"1"})
    yield from _extractions(copier, folder, {name: kept[name] for name in _WITHOUT_FIRST & kept.keys()}, {})


_WITHOUT_FIRST = {"link:.zip", "pipe:.zip", "device:.zip", "socket:.zip"}


def _bombs() -> dict[str, bytes]:
    """Return small archives that exceed 16 MiB when extracted, or that a reader can never finish."""
    large = bytes(1 << 20)
    members = b"".join(entry(str(number), large) for number in range(24)) + END
    tars = {
        "many large members": members,
        "one huge member": entry("x", bytes(32 << 20)) + END,
        "zeros behind the end": entry("x", b"1") + END + bytes(32 << 20),
        "extended headers": entry("././@LongLink", bytes(500_000), tarfile.GNUTYPE_LONGNAME) * 50,
        "declared size without data": entry("x", size=b"%011o\0" % (1 << 32)) + large,
        "member that ends where it starts": entry("x", size=base256(-512)) + entry("y", b"1") + END,
        "huge number in an extended header": pax(record("size", "9" * 40)) + entry("x", b"1") + END,
        "sparse file of a terabyte": pax(
            record("GNU.sparse.major", "1")
            + record("GNU.sparse.minor", "0")
            + record("GNU.sparse.realsize", str(1 << 40))
        )
        + entry("s", b"1\n0\n1\n")
        + END,
        "many members": b"".join(entry(str(number)) for number in range(3000)) + END,
    }
    found = {
        f"{name}:{suffix}": packed(data, suffix) for name, data in tars.items() for suffix in (".tar.gz", ".tar.zst")
    }
    found["sparse file of a terabyte:.tar"] = tars["sparse file of a terabyte"]
    zeros = bytes(32 << 20)
    found["one huge member:.zip"] = _zip({"x": zeros})
    found["many large members:.zip"] = _zip({str(number): large for number in range(24)})
    found["many members:.zip"] = _zip({str(number): b"" for number in range(3000)})
    lying = bytearray(_zip({"x": zeros}))
    for header, at in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        struct.pack_into("<I", lying, lying.index(header) + at, 100)
    found["size in the headers is a lie:.zip"] = bytes(lying)
    # All entries of the directory refer to the same compressed data.
    one = _zip({"x": large})
    at = one.index(b"PK\x01\x02")
    central, end = one[at:-22], bytearray(one[-22:])
    struct.pack_into("<HHII", end, 8, 64, 64, len(central) * 64, at)
    found["overlapping members:.zip"] = one[:at] + central * 64 + bytes(end)
    found["archive in an archive:.zip"] = _zip({"a.zip": _zip({"b.zip": _zip({"x": large})})})
    return found


@fault(29, "archives that are small and become huge, or are endless", EXTRACTORS)
def bombs(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    archives = dict(spread(_readable(copier, _bombs()), limit))
    # Any archive may inflate 200-fold beyond this slack. With the usual slack, bombs would need gigabytes.
    with mock.patch.object(items, "_INFLATION_SLACK_BYTES", 1 << 20), mock.patch.object(items, "MOST_MEMBERS", 1000):
        yield from _extractions(copier, folder, archives, {})


_CONTENT = {f"class{number % 3}/{number:02}.bin": bytes(range(256)) * (1 + number % 5) for number in range(9)}


def _good_archives() -> dict[str, bytes]:
    found = {
        suffix: packed(tar_bytes(_CONTENT), suffix) for suffix in (".tar", ".tar.gz", ".tar.bz2", ".tar.xz", ".tar.zst")
    }
    return {**found, "deflated:.zip": _zip(_CONTENT), "stored:.zip": _zip(_CONTENT, zipfile.ZIP_STORED)}


def _headers(data: bytes) -> list[int]:
    """Return the offsets of a tar's headers, the only parts with a checksum."""
    return [at for at in range(0, len(data), 512) if data[at + 257 : at + 262] == b"ustar"]


def _damaged(name: str, data: bytes, count: int) -> Iterator[tuple[str, bytes]]:
    suffix = name.rpartition(":")[2]
    end = len(data.rstrip(b"\0")) if suffix == ".tar" else len(data)
    yield from spread([*cuts(data[:end], 1024)], count)
    if suffix == ".tar":
        # The data of a plain tar has no checksum.
        headers = b"".join(data[at : at + 512] for at in _headers(data))
        for what, changed in flips(headers, count, 3):
            whole = bytearray(data)
            for number, at in enumerate(_headers(data)):
                whole[at : at + 512] = changed[512 * number : 512 * number + 512]
            yield what, bytes(whole)
    else:
        yield from flips(data, count, 3)
        yield from overwrites(data, count // 4, 5)


@fault(30, "archives that are cut, damaged, encrypted, or have members twice", EXTRACTORS)
def damaged_archives(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    good = {
        name: data for name, data in _good_archives().items() if name.rpartition(":")[2].lstrip(".") in copier.kinds
    }
    cases = {
        f"{name.partition(':')[0]}, {what}:{name.rpartition(':')[2]}": changed
        for name, data in good.items()
        for what, changed in _damaged(name, data, max(1, 2 * limit // len(good)))
    }
    yield from _extractions(copier, folder, cases, _CONTENT, is_exact=True)
    once = {"a": b"data"}
    for name, data in spread([*BAD_ZIPS.items()], limit):
        yield from _extractions(copier, folder, {f"{name}:.zip": data}, once if "folder" not in name else {})
