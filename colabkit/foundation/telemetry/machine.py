"""Snapshots of the whole machine: its host and its GPUs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from colabkit.foundation.telemetry.gpus import Gpus
from colabkit.foundation.telemetry.host import Host
from colabkit.foundation.telemetry.snapshots import HostSnapshot


class Telemetry:
    """Takes snapshots; keeps its own handles to driver and process, since opening them anew is slow.

    For one thread at a time.

    Args:
        nvml: the NVML binding; by default `pynvml` as `nvidia-ml-py` installs it, if it is there.
        host: reads all but the GPUs; by default of this machine.
        environ: the process's environment.
        modules: the imported modules, among which torch may be.
    """

    def __init__(
        self,
        nvml: ModuleType | None = None,
        host: Host | None = None,
        environ: Mapping[str, str] = os.environ,
        modules: Mapping[str, Any] = sys.modules,
    ) -> None:
        self._host = Host(environ=environ) if host is None else host
        self._gpus = Gpus(nvml, environ, modules)

    def snapshot(self) -> HostSnapshot:
        """Return the state of this instant; takes about a millisecond."""
        return self._host.snapshot(self._gpus.snapshot())

    def close(self) -> None:
        """Let the driver go; may be called twice."""
        self._gpus.close()
