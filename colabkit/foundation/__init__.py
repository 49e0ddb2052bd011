"""Foundation: what every other room builds on. It imports from no other room.

- `errors`, `checks`: the exceptions, the form of their messages, and checks of arguments.
- `units`, `reports`: numbers as text, and the frozen reports that public calls return.
- `file_changes`, `partials`, `locks`: every change of files, files that appear in one rename, and waits for others.
- `processes`, `mount_table`, `environment`: child programs, the kernel's mounts, limits of this machine.
- `progress`, `plotting`: the progress bar, and the one style of all figures.
- `meters`, `telemetry`: what loaders and training publish, and samples of CPU, RAM, storage and GPUs.
- `random_numbers`, `permutation`: random numbers and shuffles as pure functions of seed and position.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
