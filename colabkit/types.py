"""Types that colabkit's functions accept or return, for annotations.

Most are parts of reports and are created only by colabkit. You can implement three of them yourself: `Source`,
`Stateful` and `MapDataset` are protocols.
"""

from colabkit.foundation import (
    DiskReport,
    GpuReport,
    HostSnapshot,
    LoaderFacts,
    LoaderMeters,
    MemoryReport,
    MetersSnapshot,
    Report,
    StepDone,
)
from colabkit.loading import DecoderChoice, SimulatedEpoch, Tier
from colabkit.monitoring import RunStatus, Shares
from colabkit.notebook import SamplePrediction
from colabkit.packs import ImageFiles, MapDataset, PackInfo, SampleGrid
from colabkit.storage import Item, Listing, PathTable, ReadRate, Source
from colabkit.training import EpochRecord, SavedCheckpoint, Stateful, Validation

__all__ = [
    "DecoderChoice",
    "DiskReport",
    "EpochRecord",
    "GpuReport",
    "HostSnapshot",
    "ImageFiles",
    "Item",
    "Listing",
    "LoaderFacts",
    "LoaderMeters",
    "MapDataset",
    "MemoryReport",
    "MetersSnapshot",
    "PackInfo",
    "PathTable",
    "ReadRate",
    "Report",
    "RunStatus",
    "SampleGrid",
    "SamplePrediction",
    "SavedCheckpoint",
    "Shares",
    "SimulatedEpoch",
    "Source",
    "Stateful",
    "StepDone",
    "Tier",
    "Validation",
]


def __dir__() -> list[str]:
    return __all__
