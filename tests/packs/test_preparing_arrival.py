"""`prepare(start="now")` returns a pack that is still being packed; its batches equal those of a complete pack."""

from __future__ import annotations

import _thread
import contextlib
import os
import pickle
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import warm_python
from far_mounts import FuseMount, has_fuse
from held_reads import HeldReads
from loader_batches import loader_threads
from PIL import Image
from preparations import forget_local, left_over
from trees import leftovers, make_tree, needs
from waiting import LONG_S, wait_until

from colabkit.errors import BadImage, InvalidOption, PackingFailed
from colabkit.loading.engine.thread_pool import ThreadPool
from colabkit.loading.loader import Loader
from colabkit.packs.dataset.arriving import ArrivingSamples
from colabkit.packs.dataset.mixture import Mixture
from colabkit.packs.dataset.opened_pack import open_pack
from colabkit.packs.format import arrival
from colabkit.packs.packing.verification import verify
from colabkit.packs.preparing.api import prepare
from colabkit.packs.preparing.background_pack import BackgroundPack
from colabkit.packs.preparing.prepared_pack import PreparedPack
from colabkit.sampler import ShuffledOrder
from colabkit.storage.sources import concurrency
from colabkit.training.step_factory import supervised_step
from colabkit.training.trainer import train

OPTIONS: dict[str, Any] = {"to": None, "progress": False}


@pytest.fixture(autouse=True)
def no_leftovers(tmp_path: Path, near_storage: Path) -> Iterator[None]:
    """Check after each test that no threads and no incomplete files are left."""
    yield
    wait_until(lambda: not any(thread.name.startswith("colabkit") for thread in threading.enumerate()))
    assert left_over(near_storage) + leftovers(tmp_path) == []


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait only briefly for a request of a sample, and for reads that hang."""
    monkeypatch.setattr(arrival, "_FIRST_REQUEST_S", 0.05)
    monkeypatch.setattr(concurrency, "_GRACE_S", 0.05)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a folder of 60 images in three classes."""
    return make_tree(tmp_path / "tree", 20)


@pytest.fixture
def held(tree: Path) -> HeldReads:
    """Return a slow source that lets no file be read until the test allows it."""
    source = HeldReads(tree)
    source.may_read = lambda _: False
    return source


@pytest.fixture
def arriving(held: HeldReads) -> Iterator[BackgroundPack]:
    """Return a pack of `held`, of which no sample has arrived."""
    pack = early(held)
    assert isinstance(pack, BackgroundPack)
    yield pack
    held.go_on()
    pack.close()


def early(source: object, **options: Any) -> PreparedPack:
    return prepare(source, start="now", **{**OPTIONS, "size": (6, 5), **options})


def batches(loader: Loader, count: int | None = None) -> list[tuple[torch.Tensor, torch.Tensor]]:
    found = []
    with contextlib.closing(iter(loader)) as coming:
        for images, labels in coming:
            found.append((images.clone(), labels.clone()))
            if len(found) == count:
                break
    return found


def assert_equal(found: list[Any], expected: list[Any]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


def test_files_are_read_in_the_order_in_which_the_loader_needs_them(held, tree, monkeypatch):
    monkeypatch.setattr(arrival, "_FIRST_REQUEST_S", LONG_S)
    pack = early(held)
    loader = Loader(pack["train"], 4, shuffle=True, seed=3)
    order = ShuffledOrder(60, seed=3).indices(0, 0, 60).tolist()
    with contextlib.closing(iter(loader)) as coming:
        threading.Thread(target=held.go_on).start()
        next(coming)
    pack.finish()
    names = sorted(str(path.relative_to(tree)) for path in tree.rglob("*.png"))
    read = list(held.reads)
    assert sorted(read) == names
    assert read[:60] == [names[number] for number in order]


@pytest.mark.parametrize("encoding", ["raw", "source"])
@pytest.mark.parametrize("num_workers", [0, 1, 2])
def test_batches_equal_those_of_a_complete_pack(tree, near_storage, encoding, num_workers):
    def epochs(pack: PreparedPack) -> list[Any]:
        loader = Loader(pack["train"], 7, shuffle=True, num_workers=num_workers)
        return batches(loader) + batches(loader)

    expected = epochs(prepare(tree, encoding=encoding, **OPTIONS))
    forget_local(near_storage)
    pack = early(HeldReads(tree), encoding=encoding, size=None)
    assert_equal(epochs(pack), expected)
    assert pack.finish().is_complete
    assert_equal(epochs(pack), expected)
    assert verify(pack.path, progress=False).is_good


def test_a_view_waits_only_for_its_own_samples(held, arriving, tree):
    view = arriving["train"].subset([41, 2])
    held.may_read = lambda path: path in ("ants/002.png", "cats/001.png")
    with held.changed:
        held.changed.notify_all()
    images, labels = view[:]
    assert labels.tolist() == [2, 0]
    assert torch.equal(images[0], arriving["train"][41][0])
    assert not arriving.is_complete
    assert "of 60 samples are packed" in repr(arriving)


def test_an_epoch_resumes_in_a_pack_that_is_packed_again(tree, near_storage):
    expected = batches(Loader(prepare(tree, **OPTIONS)["train"], 7, shuffle=True))
    forget_local(near_storage)
    source = HeldReads(tree)
    loader = Loader(early(source)["train"], 7, shuffle=True)
    found = batches(loader, 3)
    state = loader.state_dict()
    source.go_on()
    wait_until(lambda: not threads_of_packing())
    forget_local(near_storage)
    loader = Loader(early(HeldReads(tree))["train"], 5, shuffle=True)
    loader.load_state_dict(state)
    rest = batches(loader)
    joined = [torch.cat(column) for column in zip(*found, *rest, strict=True)]
    assert_equal([joined], [[torch.cat(column) for column in zip(*expected, strict=True)]])


def trained(pack: PreparedPack, to: Path, last_step: int = 100) -> list[torch.Tensor]:
    """Train for two epochs, or to a step; return the weights."""

    def on_step(progress: Any) -> None:
        if progress.step >= last_step:
            raise StopIteration

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(90, 3))
    step = supervised_step(model, torch.optim.SGD(model.parameters(), 0.1))
    loaders = [Loader(pack["train"].subset(part), 7, shuffle=True) for part in (range(50), range(50, 60))]
    train(step, loaders[0], epochs=2, to=to, validate=loaders[1], on_step=on_step)
    return [weights.detach() for weights in model.parameters()]


def test_training_that_is_stopped_and_resumed_while_files_arrive_gives_the_same_weights(tree, near_storage, tmp_path):
    expected = trained(prepare(tree, **OPTIONS), tmp_path / "expected")
    forget_local(near_storage)
    with early(HeldReads(tree)) as pack:
        trained(pack, tmp_path / "run", last_step=3)
    forget_local(near_storage)
    weights = trained(early(HeldReads(tree)), tmp_path / "run")
    assert all(torch.equal(one, other) for one, other in zip(weights, expected, strict=True))


def threads_of_packing() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "colabkit-prepare"]


def test_the_report_tells_an_incomplete_pack_from_a_complete_and_saved_one(held, tmp_path):
    pack = early(held, to=tmp_path / "saved")
    before = pack.report
    assert (before.way, before.saved_path, before.packed_s) == ("arriving", None, None)
    assert "In the background, packing the source" in repr(before)
    assert before.unsaved == "it is not complete yet"
    held.go_on()
    assert pack.finish() is pack
    assert pack.report.way == "packed"
    assert pack.report.saved_path.read_bytes() == pack.path.read_bytes()
    assert early(held, to=tmp_path / "saved").report.way == "local"


def test_a_local_pack_is_saved_in_the_background(held, tmp_path, tree):
    local = prepare(tree, size=(6, 5), **OPTIONS)
    pack = early(tree, to=tmp_path / "saved")
    assert (pack.report.way, pack.path, pack.is_complete) == ("local", local.path, True)
    assert len(batches(Loader(pack["train"], 4))) == 15
    assert pack.finish().report.saved_path.read_bytes() == pack.path.read_bytes()
    assert early(tree, to=tmp_path / "saved").report.unsaved == ""


def test_a_pack_that_cannot_be_saved_is_reported(held, tmp_path):
    (tmp_path / "saved").write_text("a file")
    held.go_on()
    pack = early(held, to=tmp_path / "saved").finish()
    assert pack.report.saved_path is None
    assert "saved" in pack.report.unsaved
    assert len(batches(Loader(pack["train"], 4))) == 15


def test_a_later_call_while_the_pack_arrives_waits_for_it(held, arriving, tree):
    found: list[PreparedPack] = []
    other = threading.Thread(target=lambda: found.append(early(held)))
    other.start()
    held.go_on()
    other.join(LONG_S)
    assert found[0].report.way == "local"
    assert found[0]["train"].fingerprint == arriving["train"].fingerprint


def test_closing_an_incomplete_pack_removes_it_and_ends_the_wait_for_its_samples(held, near_storage):
    with early(held) as pack:
        loader = iter(Loader(pack["train"], 4))
    with pytest.raises(PackingFailed, match="the pack was closed before it was complete"):
        next(loader)
    held.go_on()
    assert not list(near_storage.rglob("*.h5"))
    assert early(held).finish().is_complete


def test_ctrl_c_while_threads_start_ends_those_that_wait_for_samples(held, arriving, monkeypatch):
    start, wait_for, waits = ThreadPool.start, ArrivingSamples.wait_for, threading.Event()

    def noted(*args: Any) -> None:
        waits.set()
        wait_for(*args)

    def interrupted(pool: ThreadPool) -> None:
        start(pool)
        assert waits.wait(LONG_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(ArrivingSamples, "wait_for", noted)
    monkeypatch.setattr(ThreadPool, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iter(Loader(arriving["train"], 4, shuffle=True)))
    assert not loader_threads()
    held.go_on()


def test_ctrl_c_ends_the_wait_of_a_loader_and_packing_continues(held, arriving):
    def interrupt() -> None:
        wait_until(lambda: held.reads)
        _thread.interrupt_main()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        next(iter(Loader(arriving["train"], 4, shuffle=True)))
    assert not loader_threads()
    held.go_on()
    assert len(batches(Loader(arriving["train"], 4))) == 15


def test_an_error_of_the_source_reaches_the_loader_and_another_call_packs_again(held, tree):
    broken = tree / "bees" / "003.png"
    content = broken.read_bytes()
    broken.write_bytes(b"rubbish")
    pack = early(held)
    held.go_on()
    with pytest.raises(BadImage, match=r"Cannot pack 'bees/003\.png' of"):
        batches(Loader(pack["train"], 4))
    with pytest.raises(BadImage, match=r"Cannot pack 'bees/003\.png' of"):
        pack.finish()
    broken.write_bytes(content)
    assert early(held).finish().is_complete


def test_images_of_several_sizes_raise_an_error_with_advice(tree):
    Image.new("RGB", (9, 9)).save(tree / "dogs.png")
    (tree / "zebras").mkdir()
    (tree / "dogs.png").rename(tree / "zebras" / "000.png")
    pack = early(HeldReads(tree), size=None, encoding="raw")
    with pytest.raises(BadImage, match=r"the shape is 9x9x3, but 6x5x3 in the first sample\. Use size="):
        batches(Loader(pack["train"], 4))


def test_bad_files_become_blank_and_are_reported(tree):
    (tree / "bees" / "003.png").write_bytes(b"rubbish")
    pack = early(HeldReads(tree), on_bad="blank")
    assert isinstance(pack, BackgroundPack)
    images = torch.cat([images for images, _ in batches(Loader(pack["train"], 4))])
    assert not images[23].any()
    assert pack.finish().report.bad[0][0] == "bees/003.png"
    assert torch.equal(torch.cat([images for images, _ in batches(Loader(pack["train"], 4))]), images)


@pytest.mark.parametrize(
    ("source", "options", "why"),
    [
        (lambda tree: tree, {}, "the source is on this machine"),
        (HeldReads, {"on_bad": "skip"}, "the number of bad files, which are skipped, is not known before"),
        (HeldReads, {"encoding": "jpeg"}, "the sizes of the samples are not known before"),
        (HeldReads, {"encoding": "source", "size": None, "on_bad": "blank"}, "the sizes of the samples"),
        (HeldReads, {"size": None}, "images may differ in size; use size="),
    ],
)
def test_packs_that_cannot_be_read_early_are_returned_when_they_are_complete(tree, tmp_path, source, options, why):
    pack = early(source(tree), **options)
    assert type(pack) is PreparedPack
    assert why in pack.report.late
    assert f"Packed before the call returned: {pack.report.late}" in repr(pack.report)
    saved = early(source(tree), to=tmp_path / "saved", **options)
    assert saved.is_complete
    assert saved.finish().report.saved_path is not None


def test_images_of_unknown_sizes_are_packed_as_without_start(tree):
    for number in range(20, 60):
        Image.new("RGB", (5, 6)).save(tree / "ants" / f"{number:03d}.png")
    Image.new("RGB", (9, 9)).save(tree / "ants" / "021.png")
    assert early(HeldReads(tree), size=None).encoding == "source"


def test_ctrl_c_during_packing_that_cannot_be_read_early_leaves_nothing(held):
    def interrupt() -> None:
        wait_until(lambda: held.reads)
        _thread.interrupt_main()

    threading.Thread(target=interrupt).start()
    with pytest.raises(KeyboardInterrupt):
        early(held, on_bad="skip")
    held.go_on()


def test_a_state_of_an_incomplete_pack_is_refused_for_other_files_and_one_of_other_samples_for_a_complete_pack(
    held, arriving, tree, near_storage
):
    incomplete = Loader(arriving["train"], 7, shuffle=True).state_dict()
    held.go_on()
    complete = Loader(arriving.finish()["train"], 7, shuffle=True).state_dict()
    assert complete["fingerprint"] != incomplete["fingerprint"]
    forget_local(near_storage)
    path = tree / "bees" / "003.png"
    before = path.stat()
    content = bytearray(path.read_bytes())
    Image.new("RGB", (5, 6), (1, 2, 3)).save(path)
    path.write_bytes(path.read_bytes().ljust(len(content), b"\0"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    other = prepare(tree, size=(6, 5), **OPTIONS)
    assert path.stat().st_size == before.st_size
    with pytest.raises(InvalidOption, match="another dataset"):
        Loader(other["train"], 7, shuffle=True).load_state_dict(complete)
    Image.new("RGB", (5, 6)).save(tree / "bees" / "100.png")
    for state in (complete, incomplete):
        with pytest.raises(InvalidOption, match="another dataset"):
            Loader(prepare(tree, size=(6, 5), **OPTIONS)["train"], 7, shuffle=True).load_state_dict(state)


def test_a_pack_without_its_source_is_saved(tree, tmp_path):
    prepare(tree, size=(6, 5), **OPTIONS)
    tree.rename(tmp_path / "gone")
    pack = early(tree, to=tmp_path / "saved")
    assert pack.finish().report.saved_path is not None


def test_a_forked_reader_ends_when_the_packing_process_is_killed(tree, tmp_path):
    """The reader writes the message of its error to a file."""
    program = PROGRAM.format(doubles=DOUBLES, tree=str(tree), may_read="False", saved=None)
    program = program.replace("pack['train'][0]", "").replace('pack["train"][0]', "")
    program += f"""
import os, signal
if os.fork():
    os.kill(os.getpid(), signal.SIGKILL)
try:
    pack["train"][0]
except Exception as error:
    open({str(tmp_path / "new")!r}, "w").write(str(error))
    os.rename({str(tmp_path / "new")!r}, {str(tmp_path / "error")!r})
os._exit(0)
"""
    warm_python.run([sys.executable, "-c", program], timeout=LONG_S)
    wait_until((tmp_path / "error").exists)
    assert "which was packing, has ended" in (tmp_path / "error").read_text()
    # The next call removes what the killed process left.
    assert early(HeldReads(tree)).finish().is_complete


def test_an_unknown_start_raises_an_error(tree):
    with pytest.raises(InvalidOption, match=r"start='soon'; expected 'complete' or 'now'"):
        prepare(tree, start="soon", **OPTIONS)  # type: ignore[arg-type]


def test_pickles_mixtures_and_all_rows_wait_for_the_complete_pack(held, arriving):
    threading.Thread(target=held.go_on).start()
    data = arriving["train"]
    assert len(pickle.dumps(data)) < 1000
    assert arriving.is_complete
    assert torch.equal(pickle.loads(pickle.dumps(data)).rows, data.rows)
    assert type(pickle.loads(pickle.dumps(arriving))) is PreparedPack


def test_all_rows_wait_for_the_complete_pack(held, arriving):
    threading.Thread(target=held.go_on).start()
    rows = arriving["train"].rows
    assert torch.equal(rows, open_pack(arriving.finish().path)["train"].rows)


def test_a_mixture_waits_for_the_complete_pack(held, arriving):
    threading.Thread(target=held.go_on).start()
    assert len(Mixture({arriving["train"]: 1})) == 60
    assert arriving.is_complete


def test_forked_processes_of_a_dataloader_see_samples_that_arrive(held, arriving):
    loader = torch.utils.data.DataLoader(arriving["train"], 10, num_workers=1, multiprocessing_context="fork")
    coming = iter(loader)
    held.go_on()
    assert sum(len(labels) for _, labels in coming) == 60


def test_a_process_that_was_forked_before_the_pack_was_complete_cannot_pickle_it(held, arriving):
    class PicklingDataset(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> str:
            try:
                pickle.dumps(arriving["train"])
            except PackingFailed as error:
                return str(error)
            return ""

    coming = iter(torch.utils.data.DataLoader(PicklingDataset(), num_workers=1, multiprocessing_context="fork"))
    held.go_on()
    assert "this process was forked while the pack was incomplete" in next(coming)[0]


DOUBLES = [str(Path(__file__).parents[1] / "doubles")]
PROGRAM = """
import sys, os
sys.path[:0] = {doubles!r}
from held_reads import HeldReads
import colabkit
source = HeldReads(__import__("pathlib").Path({tree!r}))
source.may_read = lambda path: {may_read}
pack = colabkit.prepare(source, start="now", size=(6, 5), to={saved!r}, progress=False)
pack["train"][0]
"""


@pytest.mark.parametrize("is_complete", [True, False])
def test_the_end_of_the_process_removes_an_incomplete_pack_and_saves_a_complete_one(
    tree, tmp_path, near_storage, is_complete
):
    may_read = "True" if is_complete else 'path == "ants/000.png"'
    program = PROGRAM.format(doubles=DOUBLES, tree=str(tree), may_read=may_read, saved=str(tmp_path / "saved"))
    program += "pack['train'].rows\n" * is_complete
    ended = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True, timeout=LONG_S)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert len(list((tmp_path / "saved").glob("*.h5"))) == is_complete
    assert len(list(near_storage.rglob("*.h5"))) == is_complete


@pytest.mark.full
def test_a_folder_on_a_slow_mount_arrives_while_it_is_read(tree, tmp_path):
    needs("FUSE", has_fuse())
    with FuseMount(tmp_path / "far", tree, latency_s=0.005, at_once=4):
        pack = early(tmp_path / "far", to=tmp_path / "saved")
        assert isinstance(pack, BackgroundPack)
        assert sum(len(labels) for _, labels in batches(Loader(pack["train"], 4, shuffle=True))) == 60
        assert pack.finish().report.saved_path is not None
