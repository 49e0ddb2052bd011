"""Data sources: folders, archives, tables, buckets and records, which all provide a list of readable items.

- `items`: the `Source` protocol, `Item` and `Listing`, and base classes such as `ArchiveSource`.
- `registry`: `open_source()` and `open_records()` choose the class that opens a path, an address or a pattern.
- `folder`: a folder tree or a single file, and `SlowSource`, a simulated slow mount.
- `zip_archive`, `tar_archive`, `tar_stream`: archives; `tar_stream` reads a tar sequentially.
- `manifest`: the files listed in a table. `bucket`: the objects below an address that fsspec reads.
- `ranges`: samples that are byte ranges of a few large files, as in `webdataset`, `tfrecord` and `lmdb_records`.
- `parquet`: rows of Parquet files that contain images.
- `lmdb_child`: the child process that locates the values in an LMDB.
- `engine`: `ConcurrentReader`, which reads many items and blocks concurrently. `reads`: reads one item, with retries.
- `concurrency`: runs calls in as many threads as increase the throughput, and repeats calls that hang.
"""
