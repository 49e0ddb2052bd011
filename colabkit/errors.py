"""The exceptions that colabkit raises: all derive from `ColabkitError`, and each also from a matching builtin.

```
ColabkitError
├── InvalidOption (ValueError)          an argument is invalid
├── SourceMissing (FileNotFoundError)   the source's path does not exist
├── BadSource (ValueError)              the source exists, but has the wrong kind or content
├── BadArchive (ValueError)             an archive is truncated, corrupt or unsafe to extract
├── BadImage (ValueError)               a file cannot be decoded as an image
├── SourceChanged (OSError)             the source changed while it was being read
├── TargetExists (FileExistsError)      the target already holds something else
├── NotEnoughSpace (OSError)            the data does not fit at its destination
├── FileFailed (OSError)                the file system refused an operation
├── NotSealed (ValueError)              a file has no seal, so it may be incomplete
├── Corrupt (ValueError)                a sealed file no longer matches its checksums
├── MissingSample (IndexError)          a dataset has no sample of this number
├── MissingSplit (KeyError)             a pack has no split of this name
├── NotMounted (FileNotFoundError)      Drive, or the requested mount, is not mounted
├── MountFailed (OSError)               Drive cannot be mounted; `cause` states the reason
├── UnsentWrites (RuntimeError)         the operation would lose writes that are not uploaded yet
├── TimedOut (TimeoutError)             no response before the deadline
├── FetchFailed (OSError)               a download failed; the message states the cause
├── MissingPackage (ImportError)        an optional package is not installed
├── NoNotebook (RuntimeError)           the operation works only in a notebook
├── PackingFailed (RuntimeError)        a packing process died, on this machine or on a cluster
├── LoaderFailed (RuntimeError)         the loader's background work failed
├── TrainingDiverged (FloatingPointError)  a step returned NaN or infinity
└── LaunchFailed (RuntimeError)         one of several training processes failed
```

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
