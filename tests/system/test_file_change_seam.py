"""`strace` sees no file change in colabkit's verbs that `file_changes` does not announce."""

from __future__ import annotations

import re
import shutil
import tarfile
import zipfile
from pathlib import Path

import pandas as pd
import pytest
from far_mounts import has_fuse
from http_servers import served
from traced_changes import run_traced
from trees import make_tree, needs

STORAGE = """
import colabkit
for name in ("tree", "tree.zip", "tree.tar", "table.csv"):
    colabkit.stage(folder / name, made / "stage" / name, progress=False)
    os.utime(folder / name)
    colabkit.stage(folder / name, made / "stage" / name, refresh=True, verify="full", progress=False)
    colabkit.unstage(made / "stage" / name)
colabkit.stage(folder / "tree.zip", made / "kept", extract=False, progress=False)
for to in ("auto", "tmpfs"):
    colabkit.unstage(colabkit.stage("samples:digits", to=to, progress=False).path)
for _ in range(2):
    colabkit.fetch(url, f"{made}/fetched/", overwrite=True, progress=False)
    os.utime(made / "fetched" / "file.bin")
for target in ("one.bin", "one.bin", "folder", "folder"):
    source = made / "fetched" if target == "folder" else made / "fetched" / "file.bin"
    colabkit.publish(source, made / "published" / target, progress=False)
colabkit.probe(folder / "tree", seconds=0.2, progress=False)
"""

PACKS = """
from concurrent.futures import ProcessPoolExecutor
import multiprocessing
import colabkit
for name, options in {
    "raw": {}, "jpeg": {"encoding": "jpeg", "size": 16}, "source": {"encoding": "source"}, "skip": {"on_bad": "skip"},
}.items():
    for _ in range(2):
        colabkit.pack(folder / "tree", made / name, overwrite=True, progress=False, **options)
colabkit.pack(folder / "table.csv", made / "table.h5", progress=False)
for method in ("fork", "spawn"):
    with ProcessPoolExecutor(2, multiprocessing.get_context(method)) as executor:
        options = {"executor": executor, "shard_bytes": 2000, "overwrite": True, "progress": False}
        colabkit.pack(folder / "tree", made / "shards.h5", **options)
colabkit.verify(made / "raw")
for _ in range(2):
    colabkit.prepare(folder / "tree.zip", to=made / "drive", progress=False, refresh=True)
list(colabkit.Loader(colabkit.FileDataset(folder / "tree"), 4, keep="disk", num_workers=2))
"""

TRAINING = """
import torch
import colabkit
from checkpoint_folders import with_far
data = colabkit.prepare("samples:digits", to=None, progress=False)
def train(to):
    model = colabkit.small_network(10, (8, 8, 3))
    step = colabkit.supervised_step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = colabkit.Loader(data["train"], 256, shuffle=True)
    return colabkit.train(step, loader, epochs=2, to=to, keep_last=1)
for _ in range(2):
    report = train(made / "local")
    with_far(train, made / "remote")
report.save(made / "run.json")
report.to_trace(made / "trace.json")
report.plot(made / "run.png")
colabkit.doctor(made / "run.json")
"""

COMMANDS = """
from colabkit.notebook.command_line import main
main(["demo", "--to", str(made / "demo"), "--epochs", "1"])
main(["runtime"])
"""

NOTEBOOK = """
from notebook_runs import kernel, with_parameters
search = [Path(path) for path in os.environ["PYTHONPATH"].split(os.pathsep)]
with kernel(made / "kernel", sys.executable, search=search, COLABKIT_DRIVE=str(made)) as running:
    running.run(with_parameters("colabkit_template", EPOCHS="2", SAVE_TO="drive:saved"))
"""

DRIVE = """
import pytest
from far_side import hosted_colab
from colabkit.foundation.mount_table import DRIVEFS_FOLDER
import colabkit
with pytest.MonkeyPatch.context() as patch, hosted_colab(made / "colab", patch) as colab:
    cache = colab.home / DRIVEFS_FOLDER / "123" / "content_cache"
    cache.mkdir(parents=True)
    (cache / "d0").write_bytes(bytes(1000))
    colabkit.mount()
    colabkit.flush()
    colabkit.clear_cache()
    colabkit.unmount()
"""

PROGRAMS = {
    "storage": STORAGE,
    "packs": PACKS,
    "training": TRAINING,
    "commands": COMMANDS,
    "notebook": NOTEBOOK,
    "drive": DRIVE,
}
START = """
import os, sys
from pathlib import Path
folder, made, url = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
"""
ALLOWED = {
    r"^utimensat.*/lock\"": "`file_changes.touch` shows that a process is alive, at most once a second",
    r"O_RDWR\|O_NOFOLLOW.*/lock>": "`file_changes.open_existing_lock` tests whether another process holds a lock",
    r"^utimensat.*/(data|fetched)/": "these programs change the modification times of their sources",
    r"/colabkit-demo-": "the demo removes its temporary folder at the end",
    r"/kernel(\"|/(kernels|ipython|work|keras))": "the test's kernel, and files of IPython",
    r"/colab(\"|/(double|home|content|drive-content))": "the fake of hosted Colab, and the server of its mount",
}
"""Changes, as regular expressions of the trace, that need no announcement, each with the reason."""


@pytest.mark.full
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_file_change_is_announced(tmp_path: Path, name: str) -> None:
    needs("strace", shutil.which("strace") is not None)
    needs("FUSE", has_fuse())
    data, made, packages = (tmp_path / part for part in ("data", "made", "packages"))
    make_tree(data / "tree", 4)
    with zipfile.ZipFile(data / "tree.zip", "w") as archive, tarfile.open(data / "tree.tar", "w") as tar:
        tar.add(data / "tree", "tree")
        for path in (data / "tree").rglob("*.png"):
            archive.write(path, path.relative_to(data))
    images = sorted(str(path) for path in (data / "tree").rglob("*.png"))
    pd.DataFrame({"path": images, "label": [0, 1] * 6}).to_csv(data / "table.csv", index=False)
    for folder in (made, packages):
        folder.mkdir()
    with served(b"content" * 1000) as server:
        program = ["-c", START + PROGRAMS[name], data, made, server.url]
        found, announced = run_traced(program, packages, COLABKIT_LOCAL=tmp_path / "local")
    unexpected = [line for line in found if not any(re.search(allowed, line) for allowed in ALLOWED)]
    assert not unexpected, "\n".join(unexpected[:20])
    assert "remove" in announced


def test_a_change_without_an_announcement_is_found(tmp_path: Path) -> None:
    needs("strace", shutil.which("strace") is not None)
    made = tmp_path / "made"
    made.mkdir()
    program = "from colabkit.foundation import file_changes; file_changes.write_file(made / 'a', b'1'); "
    for number, change in enumerate(
        ("(made / 'a').write_bytes(b'2')", "(made / 'b').mkdir()", "os.unlink(made / 'a')")
    ):
        packages = tmp_path / f"packages{number}"
        packages.mkdir()
        found, _ = run_traced(["-c", START + program + change, tmp_path, made, ""], packages)
        assert found
        assert all(str(made) in line for line in found)
        (made / "a").unlink(missing_ok=True)
