"""Run a program under `strace`, and find the file changes that it made without `file_changes`.

In the program and its Python children, a hook announces each operation of `file_changes` by a system call that does
nothing but appear in the trace: `getxattr("/announced/<operation>/<path>")`. In each thread, every system call that
changes a file must follow the announcement of a suitable operation on that file.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

SITE = """
import contextlib, os
with contextlib.suppress(ImportError):
    from colabkit.foundation import file_changes
    def announce(operation, path):
        with contextlib.suppress(OSError):
            os.getxattr(f"/announced/{operation}/{os.path.abspath(path)}", "user.announced")
    file_changes.hook = announce
"""

OPEN = {"open", "openat", "openat2", "creat"}
WRITE = {"write", "writev", "pwrite64", "pwritev", "pwritev2", "copy_file_range", "sendfile"}
ATTRIBUTES = {"chmod", "fchmod", "fchmodat", "utime", "utimes", "utimensat", "setxattr", "fsetxattr"}
OTHERS = (
    "rename renameat renameat2 link linkat symlink symlinkat unlink unlinkat rmdir mkdir mkdirat mknod mknodat "
    "truncate ftruncate fallocate lsetxattr removexattr lremovexattr fremovexattr chown fchown lchown fchownat"
)
TRACED = {"getxattr", *OPEN, *WRITE, *ATTRIBUTES, *OTHERS.split()}

SUITABLE = {
    "create": {*OPEN, *WRITE, *ATTRIBUTES},
    "open": OPEN,
    "write": WRITE,
    "truncate": {"ftruncate"},
    "reserve": {"fallocate", "ftruncate"},
    "link": {"link", "linkat"},
    "mkdir": {"mkdir", "mkdirat"},
    "remove": {"unlink", "unlinkat", "rmdir"},
    "rename": {"rename", "renameat", "renameat2"},
    "sync": set(),
}
"""The system calls that each operation of `file_changes` may make."""

CALL = re.compile(r"(\w+)\((.*)\)\s+= (-?\d+)")
WORD = re.compile(r'(?:\w+|-?\d+)<((?:/[^>]*)?)>|"((?:[^"\\]|\\.)*)"')
CHANGING_OPEN = re.compile(r"O_(WRONLY|RDWR|CREAT|TRUNC)")


def run_traced(program: Sequence[str | Path], folder: Path, **environ: str | Path) -> tuple[list[str], set[str]]:
    """Run a program under `strace`, and return its unannounced file changes and the operations it announced.

    Args:
        program: arguments of the Python interpreter.
        folder: existing folder for the traces and for all other files that Python packages write, such as caches.
        environ: additional environment variables.
    """
    for name in ("site", "home", "trace"):
        (folder / name).mkdir()
    (folder / "site" / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(folder / "site"), *filter(None, sys.path)])
    trace = ["strace", "-ff", "-y", "--seccomp-bpf", "-qq", "-e", "signal=none", "-e", f"trace={','.join(TRACED)}"]
    # The paths of sockets, which `multiprocessing` creates in this folder, have a maximum length.
    with tempfile.TemporaryDirectory() as temp:
        own = {"PYTHONPATH": path, "HOME": folder / "home", "TMPDIR": temp, "OMP_NUM_THREADS": "1", **environ}
        done = subprocess.run(
            [*trace, "-o", folder / "trace" / "thread", sys.executable, *program],
            env={**os.environ, **{name: str(value) for name, value in own.items()}},
            capture_output=True,
            text=True,
            check=False,
            timeout=250,
        )
    assert done.returncode == 0, done.stderr[-3000:]
    announced: set[str] = set()
    found = []
    for thread in sorted((folder / "trace").iterdir()):
        lines = _unannounced(thread.read_text(errors="replace"), announced)
        found += [line for line in lines if str(folder) not in line and temp not in line]
    return found, announced


def _unannounced(trace: str, announced: set[str]) -> Iterator[str]:
    """Yield the file changes in the trace of one thread that do not follow a suitable announcement."""
    operation, path = "", ""
    for line in trace.splitlines():
        match = CALL.match(line)
        if match is None:
            continue
        call, arguments, result = match.groups()
        if call == "getxattr":
            if (quoted := WORD.match(arguments)) and (quoted[2] or "").startswith("/announced/"):
                operation, _, path = quoted[2].removeprefix("/announced/").partition("/")
                announced.add(operation)
            continue
        if int(result) < 0 or (call in OPEN and not CHANGING_OPEN.search(arguments)):
            continue
        changed = _path_of(call, arguments)
        if changed is None or _is_unimportant(changed, arguments):
            continue
        is_expected = call in SUITABLE.get(operation, ()) and (
            changed == path
            # Also accept parents of a new folder, and files in a removed folder.
            or (operation == "mkdir" and path.startswith(f"{changed}/"))
            or (operation == "remove" and changed.startswith(f"{path}/"))
        )
        if not is_expected:
            yield f"{line[:300]}  after {operation} {path}"


def _path_of(call: str, arguments: str) -> str | None:
    """Return the path that a system call changes; None for pipes, sockets and other objects without a path."""
    words = list(WORD.finditer(arguments))
    if call in ("rename", "renameat", "renameat2", "link", "linkat"):
        # `rename` announces the old path, and `link` the new one.
        paths = [word[2] for word in words if word[2] is not None]
        return os.path.abspath(paths[0 if call.startswith("rename") else 1])
    if call == "copy_file_range":
        return words[1][1] or None
    if call in WRITE or call in ("ftruncate", "fallocate", "fchmod", "fchown", "fsetxattr"):
        return words[0][1] if words and words[0].start() == 0 and words[0][1] else None
    folder = words[0][1] if words and words[0][1] else os.getcwd()
    name = next((word[2] for word in words if word[2] is not None), "")
    return os.path.normpath(os.path.join(folder, name))


def _is_unimportant(path: str, arguments: str) -> bool:
    """Return whether a change is of a device, a kernel file, a compiled module or a file without a name."""
    is_nameless = "O_TMPFILE" in arguments or "(deleted)" in path or path.startswith("/memfd:")
    return is_nameless or path.startswith(("/dev/", "/proc/", "/sys/")) or "__pycache__" in path
