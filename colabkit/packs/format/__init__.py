r"""The pack file format: its layout, seal and integrity checks.

A pack is plain HDF5: `<field>_<split>` datasets at the root. They are contiguous, so each has one offset in the file
and can be memory-mapped without HDF5. `X_train` holds samples, `Y_train` labels, `crc_train` the CRC32 of each sample's
bytes. Samples that differ in length are stored back to back in one flat `uint8` dataset; `X_train_index` then holds the
offset and length of each sample. The root attribute `colabkit_meta` describes fields, classes, source, options and
counts as JSON. The dataset `colabkit_notes` holds entries that are too long for the attribute, such as the list of
omitted files.

The seal is written last, into the user block: the first page of the file, which HDF5 ignores.

    colabkit pack 2\n<SHA-256 of the JSON, in hex><JSON: length, spans, tables, outside>

`length` is the length of the file, `spans` the offset and size of each non-empty dataset, `tables` the CRC32s of
labels, CRCs and other tables, and `outside` the SHA-256 of the bytes that belong neither to the user block nor to a
dataset. Reading a few kilobytes is therefore enough to check the layout before HDF5 parses the file: a single wrong bit
can make HDF5 crash or loop forever. The datasets can be checked on demand.

A pack of several shards has an index: a small pack that holds the labels and lists the names and seals of the shards.
The shards are packs themselves, stored next to the index.
"""
