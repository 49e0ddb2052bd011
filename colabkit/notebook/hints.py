"""A hint below a cell that passed unscaled images of a Loader to a model, because torch's error names no remedy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

_HINT = (
    "colabkit: Images of a Loader are uint8 unless a transform converts them. Pass "
    "transform=colabkit.augment.Normalize() to the Loader, or use colabkit.supervised_step()."
)


def hint_after_errors(shell: InteractiveShell) -> Callable[[], None]:
    """Print hints below the cells of a shell that fail; call the result to stop this."""

    def explain(result: ExecutionResult) -> None:
        error = result.error_in_exec
        # Do nothing before the first Loader exists, since the images cannot come from one.
        if not isinstance(error, RuntimeError) or "colabkit.loading.loader" not in sys.modules:
            return
        from colabkit.training import is_of_bytes

        if is_of_bytes(error):
            print(_HINT)  # noqa: T201

    shell.events.register("post_run_cell", explain)
    return lambda: shell.events.unregister("post_run_cell", explain)
