"""Faults 42 to 44: failing displays and counters, words that a shell would run, and names and secrets in output."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

import http_servers
import psutil
from contract import make_pack
from fake_nvml import Chip, FakeNvml
from hostile_names import HOSTILE, UNREADABLE, check_alike, filled, kinds
from http_servers import served
from IPython.core.interactiveshell import InteractiveShell
from magic_shells import loaded_shell
from matplotlib import font_manager
from PIL import Image
from trainings import SmallTraining, history, same
from verb_words import stand_in

import colabkit
from colabkit.errors import ColabkitError
from colabkit.foundation import Frame, meters
from colabkit.monitoring.panel.api import Dashboard
from colabkit.notebook.verbs import LINES
from colabkit.packs import open_pack

from .board import COLABKIT, Outcome, Result, attempts, fault, spread

_Cases = list[tuple[str, Callable[[], Outcome | None]]]


class BrokenScreen:
    """A screen whose front end has disappeared: the methods named in `broken` raise an error."""

    def __init__(self, broken: tuple[str, ...] = (), error: type[Exception] = OSError, after: int = 0) -> None:
        self._broken, self._error, self._left = broken, error, after

    def paint(self, frame: Frame, final: bool) -> None:
        self._left -= 1
        if "paint" in self._broken and self._left < 0:
            raise self._error("no front end")

    def close(self) -> None:
        if "close" in self._broken:
            raise self._error("no front end")


def _fail(error: type[Exception], *arguments: Any, **options: Any) -> None:
    # Create a new error each time, because an error keeps references to the frames that it passed through.
    raise error(1)


def _disturbances() -> dict[str, tuple[AbstractContextManager[Any], Any]]:
    """Return, by name, patches that make counters or screens fail, each with the `screen` of the panel."""
    found: dict[str, tuple[AbstractContextManager[Any], Any]] = {}
    errors = (OSError, RuntimeError, ValueError, psutil.AccessDenied, psutil.NoSuchProcess)
    process = ("cpu_times", "io_counters", "memory_info", "children", "num_threads", "oneshot", "create_time")
    for name, error in itertools.product(process, errors):
        patch = mock.patch.object(psutil.Process, name, side_effect=partial(_fail, error))
        found[f"Process.{name}: {error.__name__}"] = (patch, None)
    machine = ("cpu_times", "virtual_memory", "disk_io_counters", "net_io_counters", "cpu_count", "swap_memory", "pids")
    for name, error in itertools.product(machine, errors):
        patch = mock.patch.object(psutil, name, side_effect=partial(_fail, error))
        found[f"psutil.{name}: {error.__name__}"] = (patch, None)
    functions = [
        *("nvmlInit", "nvmlShutdown", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"),
        *("nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetUtilizationRates", "nvmlDeviceGetSamples"),
        *("nvmlDeviceGetMigMode", "nvmlDeviceGetPowerUsage", "nvmlSystemGetDriverVersion"),
    ]
    for name in functions:
        for code in (3, 4, 15, 999):
            driver = FakeNvml(Chip("GPU-1"), failing={name: code})
            found[f"{name} fails with {code}"] = (mock.patch.dict(sys.modules, pynvml=driver), None)
        driver = FakeNvml(Chip("GPU-1"), absent=(name,))
        found[f"{name} is missing"] = (mock.patch.dict(sys.modules, pynvml=driver), None)
    for broken in (("paint",), ("close",), ("paint", "close")):
        for after, error in itertools.product((0, 1, 3), (OSError, RuntimeError, TypeError)):
            name = f"screen fails in {' and '.join(broken)} after {after} frames: {error.__name__}"
            found[name] = (nullcontext(), BrokenScreen(broken, error, after))
    return found


def _with_panel(training: SmallTraining, screen: Any) -> Any:
    with Dashboard(screen or BrokenScreen()):
        return training.train(2)


def _with_counters(training: SmallTraining, screen: Any) -> Any:
    """Train with counters in a callback, as in many notebooks."""
    nvml: Any = sys.modules.get("pynvml")

    def note(done: meters.StepDone) -> None:
        process = psutil.Process()
        process.cpu_times(), process.io_counters(), process.memory_info(), process.children(), process.num_threads()
        psutil.cpu_times(), psutil.virtual_memory(), psutil.disk_io_counters(), psutil.net_io_counters()
        if isinstance(nvml, FakeNvml):
            nvml.nvmlInit()
            nvml.nvmlDeviceGetMemoryInfo(nvml.nvmlDeviceGetHandleByIndex(0))
        if screen:
            screen.paint("", f"step {done.step}", False)

    return training.train(2, on_step=note)


@fault(
    42,
    "GPU, process or machine counters fail, or the panel's front end is gone",
    {
        COLABKIT: _with_panel,
        "psutil and pynvml in a callback": _with_counters,
    },
)
def failing_displays(train: Callable[[SmallTraining, Any], Any], folder: Path, limit: int) -> Iterator[Result]:
    path = make_pack(folder / "data.h5", train=22)

    @cache
    def undisturbed() -> tuple[Any, Any]:
        training = SmallTraining(open_pack(path)["train"])
        return history(training.train(2)), training.weights()

    def work(patch: AbstractContextManager[Any], screen: Any) -> None:
        expected, weights = undisturbed()
        training = SmallTraining(open_pack(path)["train"])
        with patch:
            report = train(training, screen)
        assert history(report) == expected, "the history differs"
        assert same(training.weights(), weights), "the weights differ"
        assert str(report)

    cases: _Cases = [(name, partial(work, *disturbance)) for name, disturbance in _disturbances().items()]
    yield from attempts(spread(cases, limit), refusals=())


def _words(canary: Path) -> list[str]:
    """Return words that would create the canary file, or list other files, if a shell interpreted them."""
    touch = f"touch {canary}"
    return [
        *(f"$({touch})", f"`{touch}`", f"; {touch}", f"&& {touch}", f"| {touch}", f"> {canary}", f"x & {touch} &"),
        *(f"{{open('{canary}','w')}}", f"{{__import__('os').mkdir('{canary}')}}", f"!{touch}", f"%sx {touch}"),
        *(f"${{IFS}}{touch}", f"x'; {touch}; '", f'x"; {touch}; "', f"$(({touch}))", f"<({touch})"),
        *(
            "$HOME",
            "${HOME}",
            "~",
            "*",
            "?",
            "[a-z]",
            "{a,b}",
            "\\",
            "\\n",
            "a b",
            " ",
            "#x",
            "%pwd",
            "!id",
            "x",
            "{x}",
        ),
        *("-rf", "--help", "--to=x", "--", "-", "@file", "\u202etxt", "\u200b", "é", "e\u0301", "x\ty", "'", '"', "''"),
    ]


_TAKING_PATHS = [
    (verb, option)
    for verb in LINES
    for option in verb.options
    if option.kind in ("text", "path") and not option.is_closed
]


def _quoted(word: str) -> str:
    return '"' + word.replace("\\", "\\\\").replace('"', '\\"') + '"'


@fault(43, "shell characters in the arguments of magics", {COLABKIT: True, "!cp in a cell": False})
def shell_words(is_colabkit: bool, folder: Path, limit: int) -> Iterator[Result]:
    canary = folder / "canary"
    words = _words(canary)

    stack = contextlib.ExitStack()

    @cache
    def shell() -> InteractiveShell:
        # The context is never left, because the process that runs the cases just ends.
        opened = stack.enter_context(loaded_shell())
        opened.user_ns["x"] = "WRONG"
        return opened

    def quoted(verb: Any, option: Any, word: str) -> None:
        """A quoted word must reach the function unchanged."""
        value = word if not word.startswith("-") else f"./{word}"
        words = [] if option.flag else [_quoted(value)]
        places = [other for other in verb.options if not other.flag]
        if option.flag:
            line = [*(stand_in(other) for other in verb.options if other.is_required), option.flag, _quoted(value)]
        else:
            before = places[: places.index(option)]
            after = [other for other in places[len(before) + 1 :] if other.is_required]
            line = [*map(stand_in, before), *words, *map(stand_in, after)]
        with mock.patch.object(colabkit, verb.name, create=True) as function:
            shell().run_line_magic(verb.name, " ".join(line))
        shell().run_line_magic("dashboard", "--off")
        assert function.call_args.kwargs[option.name] == value, f"{function.call_args.kwargs} instead of {value!r}"

    def bare(verb: Any, word: str) -> None:
        """A word without quotes may be refused, but nothing may run it."""
        with mock.patch.object(colabkit, verb.name, create=True):
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    shell().run_line_magic(verb.name, word)
            finally:
                shell().run_line_magic("dashboard", "--off")

    def run_by_shell(word: str) -> None:
        """Expand a word in a shell, as `!cp -r {word} target` does in a notebook."""
        (folder / "target").mkdir(exist_ok=True)
        subprocess.run(
            f'cp -r "{word}" {folder / "target"}', shell=True, check=False, cwd=folder, capture_output=True, timeout=20
        )

    def after() -> None:
        is_run = canary.exists()
        with contextlib.suppress(OSError):
            (shutil.rmtree if canary.is_dir() else os.remove)(canary)
        assert not is_run, "a word was executed"

    if not is_colabkit:
        yield from attempts([(word, partial(run_by_shell, word)) for word in words[:limit]], after)
        return
    cases: _Cases = [
        (f"%{verb.name} {option.name}, {word!r}", partial(quoted, verb, option, word))
        for (verb, option), word in itertools.product(_TAKING_PATHS, words)
    ]
    cases = spread(cases, 2 * limit)
    bare_cases = [
        (f"%{verb.name} {word!r} without quotes", partial(bare, verb, word)) for verb in LINES for word in words
    ]
    yield from attempts([*cases, *spread(bare_cases, limit)], after)


_SECRETS = ("hunter22", "abcdef0123456789", "sessiontoken", "fragment99", "ya29.planted")


def _addresses(url: str) -> dict[str, str]:
    query = "?X-Amz-Signature=abcdef0123456789&X-Amz-Security-Token=sessiontoken#fragment99"
    return {
        "user and password": url.replace("://", "://me:hunter22@"),
        "signed": url + query,
        "both": url.replace("://", "://me:hunter22@") + query,
        "token": url + "?access_token=ya29.planted",
        "key": url + "?key=abcdef0123456789&sig=sessiontoken",
    }


def _outputs(work: Callable[[], Any]) -> str:
    """Call `work` and return all of its output that would reach a user or a log."""
    shown = io.StringIO()
    with contextlib.redirect_stdout(shown), contextlib.redirect_stderr(shown):
        try:
            report = work()
            shown.write(f"{report!r} {report._repr_html_()} {json.dumps(report.to_dict())}")
        except ColabkitError as error:
            traceback.print_exception(error, file=shown)
            shown.write("\n".join(error._render_traceback_()) + repr(error) + json.dumps(error.to_dict()))
    return shown.getvalue()


def _plain_fetch(address: str, to: Path) -> str:
    """Return the output of a download with `urllib` that fails or succeeds, and the list of the downloaded files."""
    import urllib.request

    shown = io.StringIO()
    try:
        (to / re.sub(r"\W", "_", address)).write_bytes(urllib.request.urlopen(address, timeout=5).read())
    except Exception:
        shown.write(f"cannot download {address}: {traceback.format_exc()}")
    return shown.getvalue() + str(list(to.iterdir()))


@fault(44, "markup in names, and secrets in addresses", {COLABKIT: True, "urllib and print": False})
def markup_and_secrets(is_colabkit: bool, folder: Path, limit: int) -> Iterator[Result]:
    numbers = itertools.count()

    def in_report(kind: Any, name: str) -> None:
        report = filled(kind, name)
        check_alike(report._repr_html_(), filled(kind, "plain")._repr_html_())
        # Clear the cache, because Matplotlib keeps font files open.
        font_manager._get_font.cache_clear()
        assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
        rows = report.text_table().split("\n")[len(repr(report).split("\n")) :]
        assert all(row.isprintable() for row in rows), "control characters are shown"

    def in_files(name: str) -> None:
        """Stage, pack and open a folder whose class and files have the given name."""
        pages = []
        for label in (name, "plain"):
            place = folder / f"case{next(numbers)}"
            for part in (label, "b"):
                (place / "tree" / part).mkdir(parents=True)
                Image.new("RGB", (4, 4)).save(place / "tree" / part / f"{label[:40]}.png")
            staged = colabkit.stage(place / "tree", place / "staged", progress=False)
            packed = colabkit.pack(staged.path, place / f"{label[:40]}.h5", progress=False)
            pack = colabkit.open_pack(packed.path)
            pages.append(
                [part._repr_html_() for part in (staged, packed, pack, colabkit.verify(packed.path, progress=False))]
            )
        for page, plain in zip(*pages, strict=True):
            check_alike(page, plain)

    def in_error(call: Callable[[str], Any], name: str) -> None:
        try:
            call(f"/no/such/{name}")
        except ColabkitError as error:
            (line,) = error._render_traceback_()
            assert len(line.splitlines()) == 1, "the message has several lines"
            assert line.isprintable(), "control characters are shown"
            raise

    def of_address(plan: http_servers.Plan, name: str, verb: str) -> None:
        place = folder / f"case{next(numbers)}"
        place.mkdir()
        with served(b"PK\x05\x06" + bytes(18), plan) as server:
            address = _addresses(server.url)[name]
            if is_colabkit:
                call = getattr(colabkit, verb)
                shown = _outputs(lambda: call(address, place / "to", timeout=1, progress=False))
            else:
                shown = _plain_fetch(address, place)
        for root in (place, Path(os.environ["COLABKIT_LOCAL"])):
            for path in root.rglob("*"):
                shown += str(path) + (path.read_bytes().decode("latin-1") if path.is_file() else "")
        found = [secret for secret in _SECRETS if secret in address and secret in shown]
        assert not found, f"{found} in {shown[:300]!r}"

    plans = {
        "success": http_servers.serve,
        "403": http_servers.status(403),
        "404": http_servers.status(404),
        "500": http_servers.status(500),
        "a web page": http_servers.body(b"<html><title>?X-Amz-Signature=abcdef0123456789 for hunter22</title>"),
        "a redirect": http_servers.redirect("/again?X-Amz-Signature=abcdef0123456789"),
    }
    verbs = ("fetch", "stage") if is_colabkit else ("urlopen",)
    secrets: _Cases = [
        (f"{verb} of an address with {name}, answer: {plan}", partial(of_address, plans[plan], name, verb))
        for verb in verbs
        for plan in plans
        for name in _addresses("")
    ]
    yield from attempts(spread(secrets, limit), refusals=ColabkitError)
    if not is_colabkit:
        return
    names = [*HOSTILE, *UNREADABLE]
    cases: _Cases = [
        (f"{kind.__name__} with {name!r}", partial(in_report, kind, name)) for kind in kinds() for name in names
    ]
    calls = (colabkit.open_pack, colabkit.stage, colabkit.FileDataset, colabkit.verify, colabkit.unstage)
    errors: _Cases = [
        (f"{call.__name__} of {name!r}", partial(in_error, call, name)) for call in calls for name in names
    ]
    files: _Cases = [
        (f"files with {name!r}", partial(in_files, name))
        for name in (name.replace("/", "|") for name in names)
        if "\0" not in name
    ]
    yield from attempts([*spread(cases, limit), *spread(errors, limit), *spread(files, limit)])
