"""The shell of Colab's kernel, which is recognized by the name of its module."""

from __future__ import annotations

from ipykernel.zmqshell import ZMQInteractiveShell


class Shell(ZMQInteractiveShell):
    """A shell like Colab's, without its additions."""
