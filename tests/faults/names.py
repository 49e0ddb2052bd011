"""Faults 23 to 27: long, similar and unreadable names, links and special files, sparse files and hard links."""

from __future__ import annotations

import itertools
import os
import random
import socket
import subprocess
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from colabkit.storage.sources.items import STAGE_SEAL

from .board import Outcome, Result, attempts, fault, spread
from .tools import COPIERS, Copier

Tree = dict[bytes, "bytes | None"]
Make = Callable[[bytes], object]

FOLDER_COPIERS = {name: copier for name, copier in COPIERS.items() if "folder" in copier.kinds}


def _tree(root: Path) -> Tree:
    """Return the bytes of all files at any depth below a folder, and None for links and special files."""
    found: Tree = {}
    stack = [(os.open(root, os.O_RDONLY | os.O_DIRECTORY), b"")]
    while stack:
        folder, prefix = stack.pop()
        for entry in os.scandir(folder):
            path = prefix + os.fsencode(entry.name)
            if entry.is_dir(follow_symlinks=False):
                stack.append((os.open(entry.name, os.O_RDONLY | os.O_DIRECTORY, dir_fd=folder), path + b"/"))
            elif not entry.is_file(follow_symlinks=False):
                found[path] = None
            elif path != STAGE_SEAL.encode():
                with os.fdopen(os.open(entry.name, os.O_RDONLY, dir_fd=folder), "rb") as file:
                    found[path] = file.read()
        os.close(folder)
    return found


def _put(root: bytes, path: bytes, data: bytes = b"data") -> None:
    """Write a file below a folder; its path may be longer than the system accepts in one call."""
    *folders, name = path.split(b"/")
    place = os.open(root, os.O_RDONLY)
    for folder in folders:
        if not os.access(folder, os.F_OK, dir_fd=place):
            os.mkdir(folder, dir_fd=place)
        inner = os.open(folder, os.O_RDONLY, dir_fd=place)
        os.close(place)
        place = inner
    with os.fdopen(os.open(name, os.O_CREAT | os.O_WRONLY, dir_fd=place), "wb") as file:
        file.write(data)
    os.close(place)


def _copies(copier: Copier, folder: Path, sources: list[tuple[str, Make]], target: str = "copy") -> Iterator[Result]:
    """Copy folders that functions fill, and compare the copies.

    Links and special files may be copied unchanged, or left out if the report lists them. No link is followed.
    """
    numbers = itertools.count()

    def work(make: Make) -> Outcome:
        place = folder / f"case{next(numbers)}"
        (place / "tree").mkdir(parents=True)
        is_done = False
        try:
            make(os.fsencode(place / "tree"))
            expected = _tree(place / "tree")
            report = copier.copy(place / "tree", place / target)
            is_done = True
            skipped = {os.fsencode(name) for name, _ in getattr(report, "skipped", ())}
            found = _tree(place / target)
            lost = {name for name, data in expected.items() if name not in found or found[name] != data}
            assert lost <= skipped, f"files differ or are missing: {sorted(lost)[:3]}"
            assert found.keys() <= expected.keys(), "there are other files than in the source"
            if skipped:
                assert all(expected[name] is None for name in skipped & expected.keys()), "a regular file is skipped"
            for text in (f"{report!r}", getattr(report, "_repr_html_", str)()):
                text.encode()
            assert _tree(place / "tree") == expected, "the source has changed"
            return Outcome.DEGRADED if skipped else Outcome.SURVIVED
        finally:
            left = set(os.listdir(place)) - {"tree", target}
            remains = left or (not is_done and os.path.lexists(place / target))
            # Do not use `shutil.rmtree`, which is recursive and fails in deep folders.
            subprocess.run(["rm", "-rf", str(place)], check=True)
            assert not remains, "unfinished files are left"

    yield from attempts([(name, partial(work, make)) for name, make in sources], refusals=copier.refusals)


@fault(23, "names of 255 bytes and very deep folders", FOLDER_COPIERS)
def long_names(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    sources: list[tuple[str, Make]] = []
    for letter, length in itertools.product(
        ("x", "é", "\u6f22", "\U0001f99c"), (200, 230, 243, 247, 250, 252, 254, 255)
    ):
        name = (letter * (length // len(letter.encode()))).encode().ljust(length, b"a")
        sources.append((f"file of {length} bytes of {letter!r}", partial(_put, path=name)))
        sources.append((f"folder of {length} bytes of {letter!r}", partial(_put, path=name + b"/" + name[:20])))
    depths = ((1, 10), (1, 500), (1, 1500), (1, 3000), (100, 10), (100, 35), (100, 60), (255, 5), (255, 15), (255, 40))
    for length, depth in depths:
        path = b"/".join([b"d" * length] * depth + [b"file"])
        sources.append((f"{depth} folders of {length} bytes", partial(_put, path=path)))
    yield from _copies(copier, folder, spread(sources, limit))
    for length in spread(list(range(236, 256)), limit // 4):
        case: list[tuple[str, Make]] = [(f"target of {length} bytes", partial(_put, path=b"a/b"))]
        yield from _copies(copier, folder / str(length), case, target="t" * length)


def _put_all(root: bytes, paths: list[bytes]) -> None:
    for number, path in enumerate(paths):
        _put(root, path, b"data %d" % number)


@fault(24, "names that differ only in case or in their Unicode form", FOLDER_COPIERS)
def similar_names(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    twins = [
        *(("é", "e\u0301"), ("Å", "A\u030a"), ("Å", "\u212b"), ("\ud55c", "\u1112\u1161\u11ab"), ("ñ", "n\u0303")),
        *(("a", "A"), ("readme", "README"), ("ß", "SS"), ("ﬁ", "fi"), ("ı", "I"), ("İ", "i̇"), ("Σ", "ς"), ("x", "x ")),
        *(("a", "\uff41"), ("K", "\u212a"), ("a", "a\u200b"), ("a", "а"), ("x.", "x"), ("ö", "o\u0308")),
    ]
    sources: list[tuple[str, Make]] = []
    for first, second in twins:
        one, other = first.encode(), second.encode()
        sources.append((f"files {first!r} and {second!r}", partial(_put_all, paths=[one, other])))
        sources.append((f"folders {first!r} and {second!r}", partial(_put_all, paths=[one + b"/1", other + b"/1"])))
    yield from _copies(copier, folder, spread(sources, limit))


@fault(25, "names with undecodable bytes, newlines and control characters", FOLDER_COPIERS)
def unreadable_names(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    generator = random.Random(25)
    odd = [bytes([byte]) for byte in range(1, 256) if byte not in b"/."]
    fixed = [
        b"caf\xe9",
        b"\xff\xfe",
        b"a\nb",
        b"\x1b[2J",
        b"-rf",
        b"$(id)",
        b"...",
        b" ",
        b"a\\b",
        b"%2e%2e",
        b"\xed\xb3\xa9",
    ]
    sources: list[tuple[str, Make]] = [
        (f"{name!r}", partial(_put_all, paths=[name, b"d" + name + b"/" + name])) for name in fixed
    ]
    for _ in range(limit):
        names = [b"".join(generator.choices(odd, k=generator.randrange(1, 30))) for _ in range(4)]
        paths = [b"%d" % number + name for number, name in enumerate(names)]
        sources.append((f"{paths[0]!r} and others", partial(_put_all, paths=[*paths[:3], paths[3] + b"/" + paths[0]])))
    yield from _copies(copier, folder, spread(sources, limit))


def _put_odd(root: bytes, kinds: tuple[str, ...], outside: Path) -> None:
    _put(root, b"class/regular", b"regular")
    links = {"loop": b".", "parent": b"..", "outside": os.fsencode(outside), "file": os.fsencode(outside / "secret")}
    links |= {"dangling": b"nowhere", "itself": b"1", "inside": b"class"}
    for number, kind in enumerate(kinds):
        for path in (root + b"/%d" % number, root + b"/class/%d" % number):
            if kind in links:
                os.symlink(links[kind], path)
            elif kind == "pipe":
                os.mkfifo(path)
            elif kind == "device":
                os.mknod(path, 0o600 | 0o020000, os.makedev(1, 3))
            else:
                with socket.socket(socket.AF_UNIX) as server:
                    os.chdir(os.path.dirname(path))
                    server.bind(os.path.basename(path))


@fault(26, "links that loop, dangle or lead outside, pipes, devices and sockets", FOLDER_COPIERS)
def odd_files(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    outside = folder / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    kinds = ("loop", "parent", "outside", "file", "dangling", "itself", "inside", "pipe", "device", "socket")
    chosen = [some for count in (1, 2, 3) for some in itertools.combinations(kinds, count)]
    sources: list[tuple[str, Make]] = [
        (" and ".join(some), partial(_put_odd, kinds=some, outside=outside)) for some in chosen
    ]
    yield from _copies(copier, folder, spread(sources, limit))


def _put_sparse(root: bytes, spans: tuple[tuple[int, bytes], ...], length: int, links: int) -> None:
    _put(root, b"a/sparse", b"")
    with open(root + b"/a/sparse", "r+b") as file:
        for offset, data in spans:
            file.seek(offset)
            file.write(data)
        file.truncate(length)
    for number in range(links):
        os.link(root + b"/a/sparse", root + b"/%d" % number)


@fault(27, "sparse files and hard links", FOLDER_COPIERS)
def sparse_files(copier: Copier, folder: Path, limit: int) -> Iterator[Result]:
    layouts = {
        "only a hole": (),
        "hole at the start": ((3_000_000, b"end"),),
        "hole at the end": ((0, b"start"),),
        "holes between": tuple((offset, b"data" * 1024) for offset in range(0, 4_000_000, 700_000)),
        "no hole": ((0, bytes(range(256)) * 400),),
    }
    sources: list[tuple[str, Make]] = [
        (f"{name}, {length} bytes, {links} links", partial(_put_sparse, spans=spans, length=length, links=links))
        for (name, spans), length, links in itertools.product(layouts.items(), (4_100_000, 5 << 20), (0, 1, 3))
    ]
    yield from _copies(copier, folder, spread(sources, limit))
