"""The front door: names sorted, complete, documented, and cheap to import."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import types

import pytest

import colabkit

HEAVY = ("torch", "h5py", "numpy", "PIL", "IPython", "ipywidgets", "google.colab", "psutil", "tqdm", "pynvml")
MODULES = {name for name in colabkit.__all__ if isinstance(getattr(colabkit, name), types.ModuleType)}
MADE_BY_COLABKIT = ("Pack", "PackedDataset", "PreparedPack")


def test_public_names_are_listed_in_order() -> None:
    assert colabkit.__all__ == sorted(colabkit.__all__)
    assert set(dir(colabkit)) == set(colabkit.__all__)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        colabkit.no_such_name  # noqa: B018


def test_every_public_object_method_and_argument_is_documented() -> None:
    wrong = []
    for name in sorted(set(colabkit.__all__) - MODULES):
        thing = getattr(colabkit, name)
        text = inspect.getdoc(thing)
        assert thing.__name__ == name
        wrong += [] if text else [name]
        if inspect.isclass(thing):
            methods = {method: one for method, one in vars(thing).items() if inspect.isfunction(one)}
            wrong += [f"{name}.{method}" for method, one in methods.items() if method[0] != "_" and not one.__doc__]
        if not name.endswith("Report") and name not in MADE_BY_COLABKIT:
            arguments = inspect.signature(thing).parameters
            wrong += [f"{name}: {one}" for one in arguments if f"\n    {one}: " not in f"\n{text}"]
    assert wrong == []


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout


def test_import_loads_nothing_heavy_and_changes_nothing() -> None:
    code = f"""
import json, logging, os, sys, threading, warnings
def state():
    return dict(os.environ), list(logging.root.handlers), list(warnings.filters), threading.active_count()
before = state()
import colabkit
heavy = [name for name in {HEAVY!r} if name in sys.modules]
loaded = sorted(name for name in sys.modules if name.startswith("colabkit"))
print(json.dumps([heavy, before == state(), loaded]))
"""
    heavy, is_unchanged, loaded = json.loads(run_python(code))
    assert heavy == []
    assert is_unchanged
    assert loaded == ["colabkit"]


def test_import_takes_under_a_tenth_of_a_second() -> None:
    code = "import time; t = time.perf_counter(); import colabkit; print(time.perf_counter() - t)"
    assert min(float(run_python(code)) for _ in range(3)) < 0.1


def test_staging_and_packing_need_no_torch() -> None:
    code = "import colabkit as c, sys; c.pack, c.stage, c.runtime, c.verify; print('torch' in sys.modules)"
    assert run_python(code).strip() == "False"
