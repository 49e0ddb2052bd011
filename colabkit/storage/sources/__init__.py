"""Where data comes from: folders, archives, tables, buckets and records as listings of items that can be read.

- `items`: the protocol of a source, its items and listing, and base classes such as `ArchiveSource`.
- `registry`: `open_source()` and `open_records()` choose which class opens a path, an address or a pattern.
- `folder`: a folder tree or one file, and `SlowSource`, a simulated slow mount.
- `zip_archive`, `tar_archive`, `tar_stream`: archives; the last reads a tar from front to back.
- `manifest`: the files that a table names. `bucket`: the objects below an address that fsspec reads.
- `ranges`: samples that are ranges of few large files; `webdataset`, `tfrecord` and `lmdb_records`: their formats.
- `lmdb_child`: the child process that finds the values in an LMDB.
- `engine`: `Reading`, which reads many items, and blocks of large ones, at once. `reads`: one item, with retries.
- `concurrency`: calls that may hang or fail, made by threads whose number is measured.
"""
