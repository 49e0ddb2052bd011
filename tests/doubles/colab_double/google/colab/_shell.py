"""The shell of Colab's kernel; its module's name is how it is told from others."""

from __future__ import annotations

from ipykernel.zmqshell import ZMQInteractiveShell


class Shell(ZMQInteractiveShell):
    """As Colab's, without its additions."""
