"""Copy data from slow remotes to fast local files, and copy results back.

- `drive`: `mount()`, `unmount()`, `flush()` and `clear_cache()` for Google Drive.
- `probing`: `probe()` measures what a mount can deliver.
- `sources`: reads the items of folders, archives, tables, record files and buckets concurrently.
- `addresses`: parses Drive links and IDs, https addresses and fsspec URLs.
- `fetching`: `fetch()` downloads from Drive, the web and buckets.
- `staging`: `stage()` makes local copies, and `unstage()` removes them.
- `publishing`: `publish()` copies finished files and folders to a slow mount; `slow_mount` stops waiting if it hangs.
- `shard_index`: finds the shards of a pack, which are copied with their index.
- `bucket_folder`: uploads files to a folder in a bucket.

To add a source type, write a class in `sources` that implements `sources.items.Source`, and register it in
`sources.registry`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
