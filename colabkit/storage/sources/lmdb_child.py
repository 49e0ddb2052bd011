"""Script of the child process that lists the location of each value in an LMDB, with LMDB's library.

The output is one JSON record per batch of values. The library returns views of the memory-mapped file, so the offset of
a value is its address minus that of the mapping.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import lmdb
import numpy as np

_BATCH = 1000
_HEAD_BYTES = 16
# Size, in bytes, of a value that describes a nested database.
_DATABASE_BYTES = 48
_MOST_DATABASES = 1024


def mappings() -> set[int]:
    """Return the addresses of this process's shared file mappings."""
    with open("/proc/self/maps") as file:
        rows = [line.split(maxsplit=2) for line in file]
    return {int(span.partition("-")[0], 16) for span, access, _ in rows if access.endswith("s")}


def is_database(environment: Any, transaction: Any, key: bytes) -> bool:
    """Return whether a key names a nested database."""
    if b"\0" in key:
        # The library would cut off the name at the zero byte.
        return False
    try:
        environment.open_db(key, txn=transaction, create=False)
    except (lmdb.IncompatibleError, lmdb.NotFoundError):
        return False
    except lmdb.DbsFullError:
        pass
    return True


def print_line(record: dict[str, Any]) -> None:
    """Print a record as a JSON line."""
    sys.stdout.write(f"{json.dumps(record)}\n")
    sys.stdout.flush()


def walk(path: str) -> None:
    """Print keys in batches, with the offset, size and first bytes of each value, and the names of nested databases."""
    before = mappings()
    environment: Any = lmdb.open(
        path, subdir=False, readonly=True, lock=False, readahead=False, max_dbs=_MOST_DATABASES
    )
    (start,) = mappings() - before
    count, entries = 0, environment.stat()["entries"]
    batch: dict[str, list[Any]] = {"keys": [], "heads": [], "offsets": [], "sizes": [], "databases": []}

    def print_batch(is_last: bool) -> None:
        print_line({**batch, "is_last": is_last})
        for values in batch.values():
            values.clear()

    with environment.begin(buffers=True) as transaction:
        flags = environment.open_db(None, txn=transaction).flags(transaction)
        if kinds := [name for name, is_set in flags.items() if is_set]:
            raise lmdb.Error(f"unsupported flags: {', '.join(kinds)}")
        for key, value in transaction.cursor():
            count += 1
            if count > entries:
                break
            size = len(value)
            if size == _DATABASE_BYTES and is_database(environment, transaction, bytes(key)):
                batch["databases"].append(bytes(key).decode("utf-8", "backslashreplace"))
                continue
            address = np.frombuffer(value, np.uint8).__array_interface__["data"][0] if size else start
            batch["keys"].append(bytes(key).hex())
            batch["heads"].append(bytes(value[:_HEAD_BYTES]).hex())
            batch["offsets"].append(address - start)
            batch["sizes"].append(size)
            if len(batch["keys"]) == _BATCH:
                print_batch(is_last=False)
    if count != entries:
        raise lmdb.Error(f"it lists {count} of {entries} keys")
    print_batch(is_last=True)


if __name__ == "__main__":
    try:
        walk(sys.argv[1])
    except Exception as error:
        print_line({"error": str(error)})
