"""What a `fetch()` that failed leaves behind, what it says of that, and what the next one does with it."""

from __future__ import annotations

import errno
from pathlib import Path

import http_servers as servers
import pytest
from http_servers import cut_after, served
from test_fetching import CONTENT, get, no_threads_stay, short_pauses
from trees import leftovers

from colabkit.errors import ColabkitError, FetchFailed, TargetExists
from colabkit.storage.fetching.api import fetch

__all__ = ["no_threads_stay", "short_pauses"]  # fixtures

CLAIM = "it resumes where it stopped"


@pytest.mark.parametrize("to", ["new/", "new/deep/", "new/deep/file.zip"])
def test_a_fetch_that_failed_takes_the_folders_away_that_it_made(tmp_path, to):
    with served(CONTENT, servers.status(404)) as server, pytest.raises(FetchFailed):
        fetch(server.url, f"{tmp_path}/{to}", progress=False)
    assert list(tmp_path.iterdir()) == []


def test_folders_that_were_there_or_hold_something_stay(tmp_path):
    (tmp_path / "mine").mkdir()
    with served(CONTENT, servers.status(404)) as server, pytest.raises(FetchFailed):
        get(server, tmp_path / "mine" / "new" / "file.bin")
    assert list(tmp_path.rglob("*")) == [tmp_path / "mine"]
    with served(CONTENT, cut_after(300_000), cut_after(0)) as server, pytest.raises(FetchFailed):
        get(server, tmp_path / "new" / "file.bin")
    (data,) = (tmp_path / "new").glob(".colabkit-*-kept.partial/data")
    assert data.read_bytes() == CONTENT[:300_000]


def failure(url: str, to: Path) -> str:
    with pytest.raises(ColabkitError) as caught:
        fetch(url, to, timeout=0.3, progress=False)
    return str(caught.value)


def test_going_on_is_promised_where_the_next_call_does_and_nowhere_else(tmp_path):
    with served(CONTENT, servers.slammed) as server:
        assert CLAIM not in failure(server.url, tmp_path), "nothing had come"
        server.plans = [servers.silent]
        assert CLAIM not in failure(server.url, tmp_path), "nothing had come"
        server.plans = [cut_after(300_000), servers.slammed]
        assert CLAIM in failure(server.url, tmp_path)
        server.plans = [servers.status(503)]
        assert CLAIM in failure(server.url, tmp_path), "what came was kept by the call before"
        server.plans = [servers.serve]
        assert get(server, tmp_path).resumed_bytes == 300_000
        server.headers, server.plans = {}, [cut_after(300_000)]
        assert CLAIM not in failure(server.url, tmp_path / "other"), "nobody knows of what version it is"


def test_going_on_is_not_promised_where_nothing_can_be_kept(tmp_path, monkeypatch):
    def refuse(fd: int, operation: int) -> None:
        raise OSError(errno.ENOTSUP, "no locks here")

    monkeypatch.setattr("fcntl.flock", refuse)
    with served(CONTENT, cut_after(300_000), servers.slammed) as server:
        assert CLAIM not in failure(server.url, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kept_bytes", [300_000, len(CONTENT)], ids=["a part", "all"])
def test_a_replacement_that_was_stopped_is_forgotten_where_the_old_is_found_unchanged(tmp_path, kept_bytes):
    with served(CONTENT) as server:
        path = get(server, tmp_path).path
        server.plans = [cut_after(300_000), cut_after(0)]
        with pytest.raises(FetchFailed):
            get(server, tmp_path, overwrite=True)
        (data,) = tmp_path.glob(".colabkit-*/data")
        data.write_bytes(CONTENT[:kept_bytes])
        server.plans = [servers.serve]
        again = get(server, tmp_path)
    assert (again.path, again.reused, again.fetched_bytes) == (path, True, 0)
    assert leftovers(tmp_path) == []


def test_a_target_that_is_taken_meanwhile_is_told_before_the_rest_comes(tmp_path):
    with served(CONTENT, cut_after(300_000), cut_after(0)) as server:
        with pytest.raises(FetchFailed):
            get(server, tmp_path)
        (tmp_path / "file.bin").write_text("mine")
        server.plans = [servers.serve]
        with pytest.raises(TargetExists, match="already exists"):
            get(server, tmp_path)
        (data,) = tmp_path.glob(".colabkit-*/data")
        assert data.stat().st_size == 300_000
        assert get(server, tmp_path, overwrite=True).resumed_bytes == 300_000
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
