"""A kernel that colabkit recognizes as hosted Colab's, in which it sees remote mounts only where Drive is mounted.

Run `python tests/doubles/colab_kernel.py -f CONNECTION_FILE` with the fake and this folder on PYTHONPATH. If PYTHONPATH
does not contain colabkit, the notebook installs it. The variable COLAB_POINT replaces /content/drive as the mount
point.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from typing import Any

from google.colab._shell import Shell
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp

POINT = os.environ.get("COLAB_POINT", "/content/drive")


class Kernel(IPythonKernel):
    """A kernel with a shell named like Colab's."""

    shell_class = Shell

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        # Import colabkit late, because cells may install it.
        self.shell.events.register("pre_run_cell", lambda _: be_hosted() if "colabkit" in sys.modules else None)


def be_hosted() -> None:
    """Make colabkit detect a hosted runtime, and hide other remote mounts."""
    importlib.import_module("colabkit.foundation.environment.places")._HOSTNAME = __file__
    importlib.import_module("colabkit.storage.drive.api").COLAB_POINT = POINT
    mounts = importlib.import_module("colabkit.foundation.mount_table")
    mounts.mounts.__defaults__ = (read_own,)


def read_own(path: str) -> str:
    """Return the table of mounts without the remote ones outside of Drive's parent folder."""
    with open(path, encoding="utf-8", errors="surrogateescape", newline="") as file:
        lines = [line for line in file if " fuse." not in line or line.split(" ")[1].startswith(os.path.dirname(POINT))]
    return "".join(lines)


if __name__ == "__main__":
    if importlib.util.find_spec("colabkit"):
        be_hosted()
    IPKernelApp.launch_instance(kernel_class=Kernel)
