"""Storage: from a slow remote to fast local files.

- `drive`: `mount()`, `unmount()`, `flush()` and `clear_cache()` for Google Drive.
- `probing`: `read_probe()` measures what a mount can deliver.
- `sources`: folders, archives, tables, records and buckets as one list of items, read concurrently.
- `fetching`: `fetch()` downloads Drive links, https and fsspec addresses, whose forms `addresses` knows.
- `staging`: `stage()` and `unstage()` make local copies. `publishing`: `publish()` copies finished files to the remote.

A new source type goes into `sources`; `sources.registry` decides which class opens which path.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
