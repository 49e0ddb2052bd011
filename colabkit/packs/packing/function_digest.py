"""What tells one user's function from another: what it does, since in a notebook its name stays when it is changed."""

from __future__ import annotations

import hashlib
import itertools
import os
import pickle
from collections.abc import Callable
from functools import partial
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

_PLAIN = {str, bytes, bool, int, float, complex, type(None)}


def function_digest(function: Callable[..., Any]) -> str:
    """Return a digest that changes with a function's code, defaults, and the values and functions that it names.

    Where that cannot be told, as for an object that cannot be pickled, it is another one each time. Functions of
    installed modules and classes are told by their names alone.
    """
    return _digest_of(function)[:16]


def _digest_of(value: Any) -> str:
    digest = hashlib.sha256()
    _add(digest, value, set())
    return digest.hexdigest()


def _add(digest: Any, value: Any, seen: set[int]) -> None:
    if isinstance(value, ModuleType):
        digest.update(value.__name__.encode())
    elif isinstance(value, type):
        digest.update(f"{value.__module__}.{value.__qualname__}".encode())
    elif isinstance(value, CodeType):
        digest.update(value.co_code + repr(value.co_names).encode())
        for constant in value.co_consts:
            _add(digest, constant, seen)
    elif isinstance(value, set | frozenset):  # whose order is another one in each process
        digest.update("".join(sorted(_digest_of(one) for one in value)).encode())
    elif isinstance(value, partial):
        for part in (value.func, value.args, value.keywords):
            _add(digest, part, seen)
    elif isinstance(value, MethodType):
        _add(digest, value.__func__, seen)
        _add(digest, value.__self__, seen)
    elif isinstance(value, FunctionType) or (isinstance(value, tuple | list | dict) and not _is_plain(value)):
        if id(value) not in seen:
            seen.add(id(value))
            add: Callable[[Any, Any, set[int]], None] = _add_function if callable(value) else _add_parts
            add(digest, value, seen)
    else:
        try:
            digest.update(pickle.dumps(value))
        except Exception:  # whatever its class raises: nothing is known of it
            digest.update(os.urandom(16))


def _add_parts(digest: Any, parts: tuple[Any, ...] | list[Any] | dict[Any, Any], seen: set[int]) -> None:
    """Add what is in a container one by one: pickled as a whole, a function in it would be told by its name alone."""
    digest.update(f"{type(parts).__qualname__} {len(parts)}".encode())
    for part in itertools.chain(parts, parts.values() if isinstance(parts, dict) else ()):
        _add(digest, part, seen)


def _is_plain(value: tuple[Any, ...] | list[Any] | dict[Any, Any]) -> bool:
    parts = itertools.chain(value, value.values()) if isinstance(value, dict) else value
    return _PLAIN.issuperset(map(type, parts))


def _add_function(digest: Any, function: FunctionType, seen: set[int]) -> None:
    digest.update(f"{function.__module__}.{function.__qualname__}".encode())
    if not _is_installed(function):
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        named = [function.__globals__[name] for name in _names(function.__code__) if name in function.__globals__]
        for part in (function.__code__, function.__defaults__, function.__kwdefaults__, *cells, *named):
            _add(digest, part, seen)


def _names(code: CodeType) -> list[str]:
    """Return the names that a function and those inside of it look up."""
    inner = [name for constant in code.co_consts if isinstance(constant, CodeType) for name in _names(constant)]
    return [*code.co_names, *inner]


def _is_installed(function: FunctionType) -> bool:
    path = function.__code__.co_filename
    return "site-packages" in path or path.startswith(os.path.dirname(os.__file__))
