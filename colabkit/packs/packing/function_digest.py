"""Digests of user functions by behavior instead of by name, because a function edited in a notebook keeps its name."""

from __future__ import annotations

import copyreg
import dis
import hashlib
import itertools
import marshal
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import PurePath
from types import CellType, CodeType, FunctionType, MappingProxyType, ModuleType
from typing import Any

_PLAIN = {str, bytes, bool, int, float, complex, type(None)}
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.local)
_DESCRIPTORS = (staticmethod, classmethod, property, cached_property)
_BOOKKEEPING = {
    *("__module__", "__qualname__", "__doc__", "__dict__", "__weakref__", "__firstlineno__", "__static_attributes__"),
    *("__annotations__", "__annotations_cache__", "__annotate__", "__annotate_func__", "_abc_impl"),
}


def function_digest(function: Callable[..., Any]) -> str:
    """Return a digest that changes when a function's behavior changes.

    The digest covers the code, the defaults, the values, functions and classes that the function refers to, also in
    custom modules, and the class and state of a callable object. Functions and classes from installed packages count by
    name only, and locks by type. Any other value that cannot be pickled, such as a connection, gives a different digest
    at each call.
    """
    return _Digests().of(function).hex()[:16]


class _Digests:
    def __init__(self) -> None:
        # Keep the values alive, so that no other value can reuse one of their IDs.
        self._known: dict[int, tuple[Any, bytes]] = {}
        self._open: list[int] = []

    def of(self, value: Any) -> bytes:
        if type(value) in _PLAIN:
            return _hashed("plain", _marshalled(value))
        if id(value) in self._open:
            # A recursive function or container is represented by its distance in the recursion.
            return _hashed("above", str(len(self._open) - self._open.index(id(value))).encode())
        if id(value) not in self._known:
            self._open.append(id(value))
            try:
                self._known[id(value)] = value, self._of_open(value)
            finally:
                self._open.pop()
        return self._known[id(value)][1]

    def _of_open(self, value: Any) -> bytes:
        if type(value) in (tuple, list, dict):
            parts = [*value, *value.values()] if isinstance(value, dict) else value
            if all(type(part) in _PLAIN for part in parts):
                return _hashed("plain", _marshalled(value))
            return self._all(type(value).__name__, parts)
        if type(value) in (set, frozenset):
            # Sort the digests, because the order of a set differs between processes.
            return _hashed("set", *sorted(map(self.of, value)))
        if isinstance(value, MappingProxyType):
            return self.of(dict(value))
        if isinstance(value, ModuleType):
            return _hashed("module", value.__name__.encode())
        if isinstance(value, _LOCKS):
            return _hashed("lock", type(value).__name__.encode())
        if isinstance(value, type):
            return self._of_class(value)
        if isinstance(value, CodeType):
            return self._all("code", (value.co_code, value.co_names, *value.co_consts))
        if isinstance(value, FunctionType):
            return self._of_function(value)
        if isinstance(value, CellType):
            return self.of(value.cell_contents) if _is_filled(value) else _hashed("empty cell")
        if isinstance(value, _DESCRIPTORS):
            names = ("__func__", "fget", "fset", "fdel", "func")
            return self._all(type(value).__name__, (getattr(value, name, None) for name in names))
        return self._of_object(value)

    def _all(self, kind: str, values: Iterable[Any]) -> bytes:
        return _hashed(kind, *map(self.of, values))

    def _of_class(self, kind: type) -> bytes:
        name = f"{kind.__module__}.{kind.__qualname__}"
        module = sys.modules.get(kind.__module__)
        path = getattr(module, "__file__", None) or ("" if module is None else "<built-in>")
        if kind.__module__ != "__main__" and _is_installed(path):
            return _hashed("class", name.encode())
        members = {key: value for key, value in vars(kind).items() if key not in _BOOKKEEPING}
        return self._all("class", (name, kind.__bases__, *itertools.chain(*sorted(members.items()))))

    def _of_function(self, function: FunctionType) -> bytes:
        name = f"{function.__module__}.{function.__qualname__}"
        code, cells = function.__code__, function.__closure__ or ()
        if _is_installed(code.co_filename):
            # For a function from an installed package, only its name and the functions that it wraps count.
            held = [cell.cell_contents for cell in cells if _is_filled(cell)]
            wrapped = [one for one in held if isinstance(one, FunctionType)]
            return self._all("function", (name, getattr(function, "__wrapped__", None), *wrapped))
        named = [function.__globals__[name] for name in _names(code) if name in function.__globals__]
        held = [cell.cell_contents for cell in cells if _is_filled(cell)]
        imported = _imported_modules(code, function.__globals__.get("__package__"))
        members = _used_members(code, [*named, *held, *imported])
        parts = (name, code, function.__defaults__, function.__kwdefaults__, *cells, *named, *members)
        return self._all("function", parts)

    def _of_object(self, value: Any) -> bytes:
        """Return the digest of an object's pickle state; functions count by their code instead of their names."""
        try:
            if hasattr(value, "detach") and hasattr(value, "numpy"):
                # Do not pickle tensors, whose pickle state contains a memory address.
                return self._all("tensor", (type(value), value.detach().cpu().numpy()))
            reduce = copyreg.dispatch_table.get(type(value))
            reduced = reduce(value) if reduce else value.__reduce_ex__(4)
        except Exception:
            # User classes can raise any error. The state is then unknown, so return a digest that equals no other.
            return os.urandom(32)
        if isinstance(reduced, str):
            module = getattr(value, "__module__", "")
            return self._all("global", (f"{module}.{reduced}", getattr(value, "__wrapped__", None)))
        items = [list(part) if number > 2 and part is not None else part for number, part in enumerate(reduced[:5])]
        return self._all("object", items)


def _hashed(kind: str, *parts: bytes) -> bytes:
    digest = hashlib.sha256(kind.encode())
    for part in parts:
        # Include the length, so different parts cannot be joined to the same bytes.
        digest.update(b"\0%d\0" % len(part) + part)
    return digest.digest()


def _marshalled(value: Any) -> bytes:
    # Later versions of the format write object references, which depend on more than the values.
    return marshal.dumps(value, 2)


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yield the code of a function, and that of the functions defined in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _names(code: CodeType) -> list[str]:
    """Return the names of the globals that code uses."""
    steps = itertools.chain.from_iterable(map(dis.get_instructions, _codes(code)))
    return list(dict.fromkeys(one.argval for one in steps if one.opname in ("LOAD_GLOBAL", "LOAD_NAME")))


def _imported_modules(code: CodeType, package: str | None) -> list[ModuleType]:
    """Import the custom modules that code imports when it runs, so that its digest is the same before and after."""
    found = []
    for one in _codes(code):
        steps = [step for step in dis.get_instructions(one) if step.opname != "EXTENDED_ARG"]
        for level, names, step in zip(steps, steps[1:], steps[2:], strict=False):
            if step.opname == "IMPORT_NAME":
                # Each name after `from a import` may be a submodule.
                paths = [step.argval, *(f"{step.argval}.{name}".lstrip(".") for name in names.argval or ())]
                found += [_custom_module("." * level.argval + path, package) for path in paths]
    return [module for module in found if module is not None]


def _custom_module(name: str, package: str | None) -> ModuleType | None:
    """Import a module unless it is built in or installed, or cannot be imported."""
    try:
        # Finding a submodule imports its package.
        spec = find_spec(name if name.startswith(".") else name.partition(".")[0], package)
        if spec is None or not _are_custom([spec.origin] if spec.has_location else spec.submodule_search_locations):
            return None
        return import_module(name, package) if find_spec(name, package) else None
    except (Exception, SystemExit):
        # User code can raise any error, and the function may handle it. A script may exit.
        return None


def _used_members(code: CodeType, values: Iterable[Any]) -> list[Any]:
    """Return the members of custom modules among the values, and of their submodules, that code may use by name."""
    names = list(dict.fromkeys(name for one in _codes(code) for name in one.co_names))
    modules = [value for value in values if _is_custom(value)]
    found: list[Any] = []
    for module in modules:
        members = [vars(module)[name] for name in names if name in vars(module)]
        found += members
        # The loop also visits these.
        modules += [one for one in members if _is_custom(one) and not any(one is known for known in modules)]
    return found


def _is_custom(value: Any) -> bool:
    """Return whether a value is a module or package outside of installed packages."""
    if not isinstance(value, ModuleType):
        return False
    path = getattr(value, "__file__", None)
    # A package without `__init__.py` has only folders.
    return _are_custom([path] if path else getattr(value, "__path__", None))


def _are_custom(places: Iterable[str | None] | None) -> bool:
    found = list(places or ())
    return bool(found) and not any(place is None or _is_installed(place) for place in found)


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _is_installed(path: str) -> bool:
    parts = PurePath(path).parts
    is_package = "site-packages" in parts or "dist-packages" in parts
    return is_package or path.startswith((os.path.dirname(os.__file__), "<frozen ", "<built-in>"))
