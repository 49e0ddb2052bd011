"""A fetch from a local web server."""

from __future__ import annotations

import random
from pathlib import Path

from http_servers import WebServer

from colabkit.storage.fetching.api import FetchReport, fetch

FETCH = "import sys; from colabkit.storage.fetching.api import fetch; fetch(sys.argv[1], sys.argv[2], progress=False)"
CONTENT = random.Random(1).randbytes(700_001)


def get(server: WebServer, to: Path, **options: object) -> FetchReport:
    return fetch(server.url, to, progress=False, **options)
