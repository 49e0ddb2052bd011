"""Foundation: utilities shared by all other subpackages. It imports none of them.

- `errors`, `messages`, `checks`: exceptions, the form of their messages, and validation of arguments.
- `units`, `reports`: formatted numbers, and the frozen reports that public functions return.
- `file_changes`, `partials`, `locks`: all changes to files, atomic creation of files, and locks between processes.
- `processes`, `mount_table`, `environment`: child programs, mounts, the platform and its resource limits.
- `progress`, `screens`, `plotting`: the progress bar, where it and panels are shown, and the common style of figures.
- `meters`, `telemetry`: meters and events of loaders and training, and snapshots of CPU, RAM, storage and GPUs.
- `image_formats`: the extensions and signatures of image files.
- `random_numbers`, `permutation`: random numbers and shuffles as pure functions of seed and position.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
