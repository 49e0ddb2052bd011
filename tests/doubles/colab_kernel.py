"""A kernel that colabkit recognizes as hosted Colab's, in which colabkit sees remote mounts only below /content.

Run `python tests/doubles/colab_kernel.py -f CONNECTION_FILE` with the fake, this folder and colabkit on PYTHONPATH.
"""

from __future__ import annotations

import sys

from google.colab._shell import Shell
from ipykernel.ipkernel import IPythonKernel
from ipykernel.kernelapp import IPKernelApp

from colabkit.foundation import mount_table as mounts
from colabkit.foundation.environment import places

MOUNTS = "/content/"
# Packages that Colab does not include.
ABSENT = ("lightning",)


class Kernel(IPythonKernel):
    """A kernel with a shell named like Colab's."""

    shell_class = Shell


def see_only_content() -> None:
    """Hide the remote mounts outside of /content; call this before importing code that reads mounts."""
    real = mounts.mounts

    def own(read: mounts.Reader = mounts.read_file) -> list[mounts.Mount]:
        return [mount for mount in real(read) if not mount.is_remote or mount.point.startswith(MOUNTS)]

    mounts.mounts = own


if __name__ == "__main__":
    see_only_content()
    # In Colab's shell, colabkit detects a hosted runtime by the existence of the file `_HOSTNAME`; any file will do.
    places._HOSTNAME = __file__
    sys.modules.update(dict.fromkeys(ABSENT))
    IPKernelApp.launch_instance(kernel_class=Kernel)
