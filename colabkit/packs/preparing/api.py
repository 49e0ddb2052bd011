"""`prepare()` returns a local pack of a source by the fastest route: local pack, saved pack or packing the source.

All local packs of one source with one set of options share a folder. Each file name contains a digest of the source's
state. Where the file system supports locks, a lock lets one process at a time create packs in the folder. The notes
file in the folder records how long staging and packing took and where the pack is saved.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from colabkit.foundation import (
    InvalidOption,
    NotMounted,
    Text,
    call,
    can_hang,
    cannot,
    check_one_of,
    checked_call,
    file_changes,
    interruptible,
    kind_of,
    local_root,
    mounts,
    option,
    user_path,
)
from colabkit.packs.format.layout import PackInfo
from colabkit.packs.packing.memory_plan import is_arrays, is_dataset
from colabkit.packs.packing.options import PackOptions
from colabkit.packs.packing.pack_call import PackCall, PlannedFiles
from colabkit.packs.packing.shards import WriteOptions
from colabkit.packs.packing.source_opening import opened_source
from colabkit.packs.preparing.background_pack import prepare_early
from colabkit.packs.preparing.preparation import Preparation, short_digest
from colabkit.packs.preparing.prepared_pack import PreparedPack
from colabkit.packs.preparing.source_state import SourceState, read_state
from colabkit.storage import (
    TABLE_SUFFIXES,
    AnySource,
    PathTable,
    Source,
    Threads,
    address_of,
    check_threads,
    identity_of,
    short_name,
)

# Maximum length of a name: with two digests, the file name stays within 255 bytes even at 4 bytes per character.
_NAME_CHARS = 56
_RESUMED = "The files staged so far are kept. Run the same call again to resume."


@interruptible("Preparing", _RESUMED)
@checked_call()
def prepare(
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | PathTable | Source,
    *,
    size: int | tuple[int, int] | None = None,
    encoding: Literal["auto", "raw", "source", "jpeg"] = "auto",
    quality: int = 90,
    channels: Literal[1, 3] = 3,
    labels: str | Sequence[str] | Callable[[str], Any] | None = "auto",
    task: Literal["auto", "classes", "multilabel", "regression"] = "auto",
    renumber: bool = False,
    splits: str | Mapping[str, float] | Callable[[str], str] | None = None,
    fields: Sequence[str] | Mapping[str, str | Callable[[str], Any]] | None = None,
    path_column: str | None = None,
    root: str | os.PathLike[str] | None = None,
    seed: int = 0,
    on_bad: Literal["raise", "skip", "blank"] = "raise",
    max_bad: float = 0.1,
    to: str | os.PathLike[str] | None = "drive:colabkit",
    threads: int | Literal["auto"] = "auto",
    start: Literal["complete", "now"] = "complete",
    refresh: bool = False,
    progress: bool = True,
) -> PreparedPack:
    """Return a local pack of a source by the fastest route; its `report` names that route.

    The routes, in order:

    1. Using a local pack of the same source, options and source state.
    2. Staging such a pack that is saved in `to`. The pack is copied as one file, and all its samples are verified.
    3. Packing the source.

    A local pack that is not saved yet is then saved, so the next session needs to stage only one file. If saving fails,
    the report contains the reason. A pack of other data or options is never used, even if it has the right name: the
    report states how it differs, and the source is packed again.

    The state of a source is the names, sizes and modification times (in a bucket, versions) of all its files, including
    those that a table lists. A local pack of a source on this machine is also replaced if a file was changed and its
    earlier times were restored. For a remote source of more than 4,000 files, the state consists of the names of all
    files, and the sizes and times of at most 4,000 files. If checking a remote source fails or takes more than ten
    seconds, or if the source no longer exists, an existing local pack is used. The contents of a URL are not checked.
    The report lists the facts that were checked; pass `refresh=True` after other changes. Saved packs of earlier states
    are never removed. If another process on this machine is preparing the same source with the same options, this call
    waits for its pack.

    Args:
        source: any source of `pack()` except arrays and datasets, including a URL.
        size: as in `pack()`.
        encoding: as in `pack()`.
        quality: as in `pack()`.
        channels: as in `pack()`.
        labels: as in `pack()`.
        task: as in `pack()`.
        renumber: as in `pack()`.
        splits: as in `pack()`.
        fields: as in `pack()`.
        path_column: as in `pack()`.
        root: as in `pack()`.
        seed: as in `pack()`.
        on_bad: as in `pack()`.
        max_bad: as in `pack()`.
        to: folder in which packs are saved; None saves nothing. A folder on Drive is ignored if Drive is not mounted.
        threads: number of concurrent reads, or `"auto"`.
        start: `"complete"` returns a complete pack, after saving it. `"now"` returns as soon as the files of the source
            are listed, and packs and saves in the background. Files are read in the order in which a `Loader` needs
            them, so training starts at once, and its first epoch takes about as long as the transfer or the training,
            whichever is longer. Batches, checkpoints and the finished pack are the same in both cases. Some packs can
            be read only when they are complete, so the call returns them then: packs of local files, of archives and
            records that have to be staged first, with `on_bad="skip"`, and with `encoding="jpeg"`.
        refresh: pack the source again even if a pack exists, and replace the saved pack.
        progress: show progress bars.

    Returns:
        The open pack, a mapping of split names to datasets. With `start="now"`, it may be a `BackgroundPack`; call its
        method `finish()` to wait until it is complete and saved.

    Raises:
        ColabkitError: any error that `pack()` raises.

    Example:
        >>> import colabkit
        >>> pack = colabkit.prepare("samples:digits", size=16, to="saved")
        >>> len(pack["train"]), pack["train"][0][0].shape
        (1797, torch.Size([3, 16, 16]))
        >>> pack.report.saved_path.exists()
        True
    """
    given: dict[str, Any] = {
        "size": size,
        "encoding": encoding,
        "quality": quality,
        "channels": channels,
        "labels": labels,
        "task": task,
        "renumber": renumber,
        "splits": splits,
        "fields": fields,
        "path_column": path_column,
        "root": root,
        "seed": seed,
        "on_bad": on_bad,
        "max_bad": max_bad,
    }
    work = _preparation_of(source, to, threads, progress, given, refresh=refresh)
    check_one_of(f"prepare {work.name!r}", "start", start, ("complete", "now"))
    with file_changes.translated(f"prepare {work.name!r}"):
        return prepare_early(work) if start == "now" else work.run()


def _preparation_of(
    source: AnySource,
    to: str | os.PathLike[str] | None,
    threads: Threads,
    progress: bool,
    given: Mapping[str, Any],
    *,
    refresh: bool,
) -> Preparation:
    """Return the work of a call; `given` are the options that determine the contents of the pack."""
    if not isinstance(source, Source) and (is_arrays(source) or is_dataset(source)):
        # Arrays have no paths that identify them, so a pack of different arrays might be returned.
        expected = "a path, an address or a table of paths"
        next_step = (
            "Pack arrays and datasets with ",
            call("pack"),
            ", and open the result in Python with open_pack()",
        )
        raise InvalidOption(cannot("prepare the source", f"the source is {kind_of(source)}", expected, next_step))
    place = {name: given[name] for name in ("path_column", "root")}
    name, key, address = identity_of(source, extract=True, **place)
    act = f"prepare {name!r}"
    options = PackOptions(act, **given)
    check_threads(act, threads)
    request = {"source": short_digest(key), "options": short_digest(repr(options.plain()))}
    as_table = {**place, "skips_missing": given["on_bad"] == "skip"}
    save_folder, unsaved = _save_folder(to, name)
    folder = local_root(os.environ) / "packs" / f"{short_name(name)[:_NAME_CHARS]}-{short_digest(*request.values())}"

    def plan(path: Path, state: SourceState | None) -> PlannedFiles:
        started = time.monotonic()
        # overwrite=True also checks fetched or staged copies of the source for changes.
        opened = opened_source(source, path, as_table, overwrite=True, progress=progress)
        packing = replace(options, act=f"pack {opened.name!r}")
        writing = WriteOptions(path, threads, None, None, resume=True, overwrite=True)
        made_of = {"state": short_digest(state.digest), "changes": state.changes} if state else {}
        listing = state.listing if state else None
        return PackCall(packing, writing, started, progress, {**request, **made_of}).planned(opened, listing)

    def check_bad(info: PackInfo) -> None:
        options.check_bad(info, str(info.path), "Repair the samples")

    def look(go_on: Callable[[], None]) -> SourceState:
        return read_state(source, address, as_table, go_on)

    is_table = name.lower().endswith(TABLE_SUFFIXES)
    is_local = os.path.isabs(name) and not is_table and not can_hang(name, mounts())
    return Preparation(
        name,
        folder.absolute(),
        request,
        save_folder,
        unsaved,
        check_bad,
        plan,
        look,
        is_local,
        threads,
        refresh,
        progress,
    )


def _save_folder(to: str | os.PathLike[str] | None, name: str) -> tuple[Path | None, Text]:
    if to is None:
        return None, option("to", None)
    if "://" in str(to):
        act, found = f"save packs of {name!r}", f"{address_of(str(to)).shown!r} is an address"
        next_step = ("Use ", option("to", None), ", then upload the pack, or write it there with ", call("pack"))
        raise InvalidOption(cannot(act, found, "a folder or a mount", next_step))
    try:
        folder = Path(os.path.abspath(user_path(to, f"save packs in {str(to)!r}")))
    except NotMounted as error:
        # Nobody may have asked for Drive, so this is no error.
        reason: Text = str(error) if error.message is None else (error.message.found, ". ", error.message.next_step)
        return None, (reason, ", or use ", option("to", None), " to save nothing")
    if os.path.isabs(name) and folder.is_relative_to(name):
        return None, f"{str(folder)!r} is inside the source, and colabkit never writes to a source"
    return folder, ""
