"""Hints below cells that fail with an error of Python or torch that names no remedy."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

_UNSCALED = (
    "Images of a Loader are uint8 unless a transform converts them. Pass "
    "transform=colabkit.augment.Normalize() to the Loader, or use colabkit.supervised_step()."
)


def hint_after_errors(shell: InteractiveShell) -> Callable[[], None]:
    """Print hints below the cells of a shell that fail; call the result to stop this."""

    def explain(result: ExecutionResult) -> None:
        if hint := _hint(result.error_in_exec):
            print(f"colabkit: {hint}")  # noqa: T201

    shell.events.register("post_run_cell", explain)
    return lambda: shell.events.unregister("post_run_cell", explain)


def _hint(error: BaseException | None) -> str:
    if isinstance(error, AttributeError):
        return _similar_name(error)
    # Before the first Loader exists, images cannot come from one.
    if isinstance(error, RuntimeError) and "colabkit.loading.loader" in sys.modules:
        from colabkit.training import is_of_bytes

        return _UNSCALED if is_of_bytes(error) else ""
    return ""


def _similar_name(error: AttributeError) -> str:
    """Suggest a public name for a misspelled one. Python suggests it too, but IPython does not show that."""
    module = error.obj
    if not isinstance(module, ModuleType) or module.__name__.partition(".")[0] != "colabkit":
        return ""
    similar = difflib.get_close_matches(str(error.name), dir(module), n=1)
    return f"Did you mean {module.__name__}.{similar[0]}?" if similar else ""
