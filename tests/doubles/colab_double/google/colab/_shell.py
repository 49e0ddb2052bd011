"""The shell of Colab's kernel, which colabkit recognizes by its module name."""

from __future__ import annotations

from ipykernel.zmqshell import ZMQInteractiveShell


class Shell(ZMQInteractiveShell):
    """A shell named like Colab's, but without Colab's additions."""
