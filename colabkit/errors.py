"""The exceptions that colabkit raises: all derive from `ColabkitError`, and each also from a matching builtin.

```
ColabkitError
├── InvalidOption (ValueError)          an argument is invalid
├── SourceMissing (FileNotFoundError)   the source, or another file to read, does not exist
├── BadSource (ValueError)              the source exists but cannot be used
├── BadArchive (ValueError)             an archive is corrupt, unsafe or of an unsupported kind
├── BadImage (ValueError)               a file is not a readable image, or has the wrong shape
├── SourceChanged (OSError)             the source changed after it was opened or listed
├── TargetExists (FileExistsError)      the target already exists and is not overwritten
├── NotEnoughSpace (OSError)            the data does not fit at its destination
├── FileFailed (OSError)                a file operation failed
├── NotSealed (ValueError)              a pack or local copy has no seal or another version
├── Corrupt (ValueError)                a file is damaged
├── MissingSample (IndexError)          a dataset has no sample at this index
├── MissingSplit (KeyError)             a pack or a source has no split of this name
├── NotMounted (FileNotFoundError)      Drive, or the requested mount, is not mounted
├── MountFailed (OSError)               Drive cannot be mounted, used or unmounted; see `cause`
├── UnsentWrites (RuntimeError)         the operation could lose writes that are not uploaded yet
├── TimedOut (TimeoutError)             an operation did not finish before its timeout
├── FetchFailed (OSError)               a download failed; the message states the cause
├── MissingPackage (ImportError)        an optional package is missing or too old
├── NoNotebook (RuntimeError)           the operation works only in a notebook
├── PackingFailed (RuntimeError)        a packing process or task died or cannot continue
├── LoaderFailed (RuntimeError)         the loader cannot make batches
├── TrainingDiverged (FloatingPointError)  a step returned NaN or infinity
└── LaunchFailed (RuntimeError)         one of several processes failed
```

Ctrl-C, or a notebook's stop button, raises `colabkit.Interrupted`, which is a `KeyboardInterrupt`.

All messages have the form *Cannot {action}: {found}; expected {expected}. {What to do next}.* The expected part is
omitted if the finding implies it. A message names options and calls in the words of the caller: Python, a magic, a
terminal or the launcher.

In a notebook an error is shown as this one line; the environment variable `COLABKIT_DEBUG=1` shows the full traceback.
"""

from colabkit.foundation import (
    BadArchive,
    BadImage,
    BadSource,
    ColabkitError,
    Corrupt,
    FetchFailed,
    FileFailed,
    InvalidOption,
    LaunchFailed,
    LoaderFailed,
    MissingPackage,
    MissingSample,
    MissingSplit,
    MountFailed,
    NoNotebook,
    NotEnoughSpace,
    NotMounted,
    NotSealed,
    PackingFailed,
    SourceChanged,
    SourceMissing,
    TargetExists,
    TimedOut,
    TrainingDiverged,
    UnsentWrites,
)

__all__ = [
    "BadArchive",
    "BadImage",
    "BadSource",
    "ColabkitError",
    "Corrupt",
    "FetchFailed",
    "FileFailed",
    "InvalidOption",
    "LaunchFailed",
    "LoaderFailed",
    "MissingPackage",
    "MissingSample",
    "MissingSplit",
    "MountFailed",
    "NoNotebook",
    "NotEnoughSpace",
    "NotMounted",
    "NotSealed",
    "PackingFailed",
    "SourceChanged",
    "SourceMissing",
    "TargetExists",
    "TimedOut",
    "TrainingDiverged",
    "UnsentWrites",
]


def __dir__() -> list[str]:
    return __all__
