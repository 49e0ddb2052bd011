"""A kernel like hosted Colab's: its shell, its host name, the double of `google.colab`, and no mounts but its own.

`python tests/colab_kernel.py -f CONNECTION_FILE`, with the double, tests and colabkit on PYTHONPATH.
"""

from __future__ import annotations

import sys

from google.colab._shell import Shell
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp

from colabkit.foundation import mount_table as mounts
from colabkit.foundation.environment import runtime_report as places

MOUNTS = "/content/"
ABSENT = ("lightning",)  # what Colab does not bring


class Kernel(IPythonKernel):
    """Runs cells in Colab's shell."""

    shell_class = Shell


def see_only_content() -> None:
    """Hide the remote mounts of others on this machine, before anything has imported what reads them."""
    real = mounts.mounts

    def own(read: mounts.Reader = mounts.read_file) -> list[mounts.Mount]:
        return [mount for mount in real(read) if not mount.is_remote or mount.point.startswith(MOUNTS)]

    mounts.mounts = own


if __name__ == "__main__":
    see_only_content()
    places._HOSTNAME = __file__  # a file that is there
    sys.modules.update(dict.fromkeys(ABSENT))
    IPKernelApp.launch_instance(kernel_class=Kernel)
