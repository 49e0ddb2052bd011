"""The NVML binding, and the GPUs that this process may use, as CUDA numbers them.

NVML lists every card whatever `CUDA_VISIBLE_DEVICES` says; CUDA obeys it, and under MIG it sees one instance of a card
and no whole one. The rules are those of CUDA's C++ Programming Guide, "CUDA Environment Variables", and of NVIDIA's
MIG User Guide, "Device Enumeration".
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

logger = logging.getLogger("colabkit")

_NEEDED = ("NVMLError", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlInit", "nvmlShutdown")
IS_LOST = 15  # NVML_ERROR_GPU_IS_LOST


@dataclass(frozen=True, eq=False)
class Device:
    """What CUDA takes for one device: a card, or a MIG instance of one.

    Attributes:
        handle: of the driver; None for a card that it does not open.
        card: handle of the card; the same one, unless this is a MIG instance.
        names: how `CUDA_VISIBLE_DEVICES` can call it, its UUID first.
        is_lost: whether the card has fallen off the bus.
    """

    handle: Any
    card: Any
    names: tuple[str, ...] = ()
    is_lost: bool = False

    @property
    def is_instance(self) -> bool:
        """Whether it is a MIG instance."""
        return self.handle is not self.card


def load(nvml: ModuleType | None = None) -> ModuleType | None:
    """Return the binding with the driver opened; None where either is missing, or another package has its name."""
    if nvml is None:
        try:
            nvml = importlib.import_module("pynvml")
        except Exception:  # a package of that name can fail in any way
            return None
    if not all(hasattr(nvml, name) for name in _NEEDED):
        _say_shadowed(getattr(nvml, "__file__", None) or repr(nvml))
        return None
    try:
        nvml.nvmlInit()
    except nvml.NVMLError:
        return None
    return nvml


@functools.cache
def _say_shadowed(file: str) -> None:
    logger.warning("no figures of GPUs: %s hides NVIDIA's module pynvml, which pip install nvidia-ml-py brings", file)


def devices(nvml: ModuleType) -> list[Device]:
    """Return all cards and MIG instances, each card before its instances, in the order of their PCI addresses."""
    found = []
    for index in range(_told(nvml, "nvmlDeviceGetCount") or 0):
        try:
            card = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            found.append(Device(None, None, is_lost=getattr(error, "value", None) == IS_LOST))
            continue
        uuid = text(_told(nvml, "nvmlDeviceGetUUID", card))
        found.append(Device(card, card, () if uuid is None else (uuid,)))
        mode = _told(nvml, "nvmlDeviceGetMigMode", card)  # now, and after the next reset
        if mode is not None and mode[0]:
            found += _instances(nvml, card, uuid)
    return found


def _instances(nvml: ModuleType, card: Any, card_uuid: str | None) -> list[Device]:
    found = []
    for index in range(_told(nvml, "nvmlDeviceGetMaxMigDeviceCount", card) or 0):
        instance = _told(nvml, "nvmlDeviceGetMigDeviceHandleByIndex", card, index)
        if instance is not None:  # the places need not all be taken
            uuid = text(_told(nvml, "nvmlDeviceGetUUID", instance))
            numbers = [_told(nvml, f"nvmlDeviceGet{kind}InstanceId", instance) for kind in ("Gpu", "Compute")]
            older = f"MIG-{card_uuid}/{numbers[0]}/{numbers[1]}"  # as drivers before 470 call it
            found.append(Device(instance, card, tuple(filter(None, (uuid, older)))))
    return found


def visible(known: list[Device], environ: Mapping[str, str]) -> list[Device]:
    """Return the devices that CUDA shows to a process, in its order; a word that names none hides all after it."""
    instances = [device for device in known if device.is_instance]
    sliced = [instance.card for instance in instances]
    numbered = instances[:1] or [device for device in known if not device.is_instance]
    wanted = environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return numbered
    found: list[Device] = []
    for word in map(str.strip, wanted.split(",")):
        if word.isdecimal():
            named = numbered[int(word) : int(word) + 1]
        elif word.startswith(("GPU-", "MIG-")):  # the beginning of a UUID will do, if it is no other's
            named = [device for device in known if any(name.startswith(word) for name in device.names)]
            if len(named) == 1 and named[0].handle in sliced:
                named = [device for device in instances if device.card is named[0].card][:1]
        else:
            named = []
        if len(named) != 1:
            break
        found += [device for device in named if device not in found]
    return found


def text(value: str | bytes | None) -> str | None:
    """Return a text of the driver, which older bindings give as bytes."""
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _told(nvml: ModuleType, query: str, *arguments: Any) -> Any:
    with contextlib.suppress(nvml.NVMLError, AttributeError):  # not supported, or a binding too old to ask
        return getattr(nvml, query)(*arguments)
    return None
