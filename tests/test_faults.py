"""The fault scoreboard: its scores, its page, and its random sequences of calls and faults."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from faults import board, machine

from colabkit.errors import FileFailed
from colabkit.storage.staging.run import StagingRun

ROOT = Path(__file__).parents[1]


def planted(wrong: str) -> board.Score:
    def work() -> board.Outcome | None:
        if wrong == "silent":
            raise AssertionError("the copy differs")
        if wrong == "untyped":
            raise KeyError("x")
        if wrong == "refused":
            raise FileFailed("Cannot copy.")
        return None

    def after() -> None:
        assert wrong != "unfinished files", "unfinished files are left"

    return board.Score(1, board.COLABKIT, (board.attempt(wrong, work, after),), 0.0)


def test_a_wrong_result_is_scored_wrong_and_silent_and_a_typed_error_is_refused() -> None:
    (silent,) = planted("silent").results
    assert (silent.outcome, silent.is_silent) == (board.Outcome.WRONG, True)
    (untyped,) = planted("untyped").results
    assert (untyped.outcome, untyped.is_silent) == (board.Outcome.WRONG, False)
    (unfinished,) = planted("unfinished files").results
    assert unfinished.outcome == board.Outcome.WRONG
    (refused,) = planted("refused").results
    assert (refused.outcome, refused.detail) == (board.Outcome.REFUSED, "FileFailed: Cannot copy.")
    assert planted("").shown == "SURVIVED"
    assert not planted("silent").is_good
    summary = board.summary([planted("silent"), planted("refused")])
    assert summary == "1 of 2 faults without a WRONG outcome; 2 cases; 1 silent errors"


def test_a_row_that_cannot_run_here_is_not_counted_as_good() -> None:
    score = board.Score(1, board.COLABKIT, (), 0.0, "no loop devices")
    assert board.summary([score]).startswith("0 of 1 faults")
    assert "no loop devices" in board.summary([score])
    assert score.shown == "not run here"


def test_the_page_lists_every_fault_once() -> None:
    board.load_rows()
    assert sorted(board.ROWS) == list(range(1, 53))
    listed = re.findall(
        r"^\| (\d+) \| (.*?) \|", (ROOT / "docs" / "explanation" / "faults.md").read_text(), re.MULTILINE
    )
    assert listed == [(str(number), row.title) for number, row in sorted(board.ROWS.items())]


@pytest.mark.full
def test_random_sequences_of_calls_and_faults_keep_all_promises() -> None:
    machine.run(3)


@pytest.mark.full
def test_a_planted_fault_breaks_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    # Simulate a tool that never updates an existing copy.
    monkeypatch.setattr(StagingRun, "_find_unchanged", lambda run, source, prior, listing: prior.sealed)
    with pytest.raises(AssertionError, match="the copy is not as expected"):
        machine.run(20, shrinks=False)
