"""The exceptions of colabkit: one family, each also the matching builtin.

```
ColabkitError
├── InvalidOption (ValueError)          an argument that cannot be meant
├── SourceMissing (FileNotFoundError)   nothing is at the source's path
├── BadSource (ValueError)              the source is there, but is not what is needed
├── BadArchive (ValueError)             an archive that is cut short, broken or hostile
├── BadImage (ValueError)               a file that cannot be decoded as an image
├── SourceChanged (OSError)             the source changed while it was read
├── TargetExists (FileExistsError)      the target holds something else
├── NotEnoughSpace (OSError)            the bytes do not fit where they should go
├── FileFailed (OSError)                the file system refused an operation
├── NotSealed (ValueError)              a file without the mark that proves it whole
├── Corrupt (ValueError)                a sealed file whose content is no longer what was sealed
├── MissingSplit (KeyError)             a pack has no split of this name
├── NotMounted (FileNotFoundError)      Drive, or the mount that is meant, is not there
├── MountFailed (OSError)               Drive cannot be mounted, with the cause
├── UnsentWrites (RuntimeError)         what was asked would lose writes that are not sent yet
├── TimedOut (TimeoutError)             no answer before the deadline
├── FetchFailed (OSError)               a download that failed, with the cause
├── MissingPackage (ImportError)        an optional package is not installed
├── NoNotebook (RuntimeError)           what needs a notebook is asked for outside of one
├── PackingFailed (RuntimeError)        a process that packs died, here or on a cluster
├── LoaderFailed (RuntimeError)         the loader's background work failed
├── TrainingDiverged (FloatingPointError)  a step returned NaN or infinity
└── LaunchFailed (RuntimeError)         one of several training processes failed
```

Every message has one form, made by `cannot`: *Cannot <verb> <object>: <found>, <needed>. <Next step>.*
In a notebook an error is that one line; with the environment variable `COLABKIT_DEBUG=1` it is the full traceback.
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
