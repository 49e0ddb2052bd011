r"""The layout, the seal and the checks of a pack; what goes into it and when is decided elsewhere.

A pack is plain HDF5: `<field>_<split>` data sets at the root, contiguous, so each has one offset in the file and can be
memory-mapped without HDF5. `X_train` holds samples, `Y_train` labels, `crc_train` the CRC32 of each sample's bytes.
Samples that differ in length lie one after the other in one flat `uint8` data set; `X_train_index` then holds offset
and length of each. The root attribute `colabkit_meta` tells fields, classes, source, options and counts as JSON, the
data set `colabkit_notes` what of it is long, as a list of who was left out.

The seal is written last, into the user block, the first page, which HDF5 leaves alone:

    colabkit pack 2\n <SHA-256 of the rest, in hex> <JSON: length, spans, tables, outside>

`length` is the file's, `spans` are offset and size of each data set, `tables` the CRC32s of labels, CRCs and other
tables, and `outside` is the SHA-256 of all bytes that lie in no data set. So a whole, unchanged pack is known by
reading a few kilobytes, before HDF5 sees the file (one wrong bit can make HDF5 loop for ever or crash), and every other
byte can be checked when it is wanted.

A pack of several shards is a small pack of its own, the index, which holds the labels and names the shards with their
seals; they lie beside it and are packs, too.
"""
