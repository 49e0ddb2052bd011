"""`torchrun` whose processes start without waiting for imports; a program for `warm_python`."""

from __future__ import annotations

from unittest import mock

import warm_python
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler


def start(*, args: tuple[str, ...], **options: object) -> warm_python.Program:
    return warm_python.Program(args, **options)


if __name__ == "__main__":
    warm_python.start_server()
    with mock.patch.object(subprocess_handler, "Popen", start):
        run.main()
