"""Types that colabkit's functions accept or return, for annotations.

Most are created only by colabkit: the parts of reports, and the return types of `dashboard()`, `open_launcher()`,
`supervised_step()` and `watch()`. You can implement three of them yourself: `Source`, `Stateful` and `MapDataset` are
protocols.
"""

from colabkit.foundation import (
    DiskReport,
    GpuReport,
    HostSnapshot,
    LoaderFacts,
    LoaderMeters,
    MemoryReport,
    MetersSnapshot,
    StepDone,
)
from colabkit.monitoring import Dashboard, Shares, WatchedLoader
from colabkit.notebook import Launcher
from colabkit.packs import ImageFiles, MapDataset, PackInfo, SampleGrid
from colabkit.storage import Item, Listing, PathTable, ReadRate, Source, StageVerifyReport
from colabkit.training import EpochRecord, Stateful, SupervisedStep, Validation

__all__ = [
    "Dashboard",
    "DiskReport",
    "EpochRecord",
    "GpuReport",
    "HostSnapshot",
    "ImageFiles",
    "Item",
    "Launcher",
    "Listing",
    "LoaderFacts",
    "LoaderMeters",
    "MapDataset",
    "MemoryReport",
    "MetersSnapshot",
    "PackInfo",
    "PathTable",
    "ReadRate",
    "SampleGrid",
    "Shares",
    "Source",
    "StageVerifyReport",
    "Stateful",
    "StepDone",
    "SupervisedStep",
    "Validation",
    "WatchedLoader",
]
