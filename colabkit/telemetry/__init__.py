"""Snapshots of the machine while something runs: CPU, RAM, storage, network, GPUs; and a thread that takes them."""

from __future__ import annotations

from colabkit.telemetry.machine import Telemetry
from colabkit.telemetry.sampler import Sampler, sampled, seen
from colabkit.telemetry.snapshots import GpuSnapshot, HostSnapshot

__all__ = ["GpuSnapshot", "HostSnapshot", "Sampler", "Telemetry", "sampled", "seen"]
