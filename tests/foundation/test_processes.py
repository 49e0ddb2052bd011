"""Child programs: output, timeout, and no waiting for programs that cannot be killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest
from waiting import comes_true

from colabkit.errors import TimedOut
from colabkit.foundation import processes
from colabkit.foundation.processes import python, run

FOREVER = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_output_errors_and_status_are_returned_and_no_shell_interprets_arguments():
    code = "import sys; print(sys.argv[1:], flush=True); print('err', file=sys.stderr); sys.exit(3)"
    finished = run(python(code, "a b; $(x)", "'"), "test", 30)
    assert (finished.status, finished.output) == (3, "['a b; $(x)', \"'\"]\nerr\n")


def test_a_program_runs_in_the_root_folder_without_input_and_with_the_given_environment():
    code = "import os, sys; print(os.getcwd(), sys.stdin.read(), os.environ.get('MARK'))"
    assert run(python(code, isolated=False), "test", 30, environ={**os.environ, "MARK": "1"}).output == "/  1\n"


@pytest.mark.full
def test_a_timeout_kills_the_program_and_its_children_and_names_the_action():
    pids: list[str] = []
    code = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), child.pid, flush=True)
child.wait()
"""
    began = time.monotonic()
    with pytest.raises(TimedOut, match=r"Cannot list '/x': no response within 3\.0 s\. Try later\."):
        run(python(code), "list '/x'", 3.0, next_step="Try later", on_line=pids.append)
    assert time.monotonic() - began < 20
    own, child = map(int, pids[0].split())
    assert not is_running(own)
    assert comes_true(lambda: not is_running(child))


def test_the_timeout_also_applies_to_a_program_that_closed_its_output():
    code = "import os, time; os.close(1); os.close(2); time.sleep(600)"
    with pytest.raises(TimedOut):
        run(python(code), "test", 1.0)


def test_a_grandchild_that_keeps_the_output_open_does_not_delay_the_result():
    code = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True).pid)
"""
    began = time.monotonic()
    finished = run(python(code), "test", 60)
    assert finished.status == 0
    assert time.monotonic() - began < 30
    os.kill(int(finished.output), signal.SIGKILL)


def test_a_child_that_cannot_be_killed_is_abandoned(monkeypatch):
    monkeypatch.setattr(processes.os, "killpg", lambda group, number: None)
    monkeypatch.setattr(processes, "_GRACE_S", 0.1)
    monkeypatch.setattr(processes, "_left_behind", [])
    lines: list[str] = []
    began = time.monotonic()
    with pytest.raises(TimedOut):
        run(python(FOREVER), "test", 1.0, on_line=lines.append)
    assert time.monotonic() - began < 20
    (child,) = processes._left_behind
    assert child.pid == int(lines[0])
    child.kill()
    child.wait()
    run(python(""), "test", 30)
    assert processes._left_behind == []


def test_lines_arrive_when_they_are_written_and_ticks_in_between(tmp_path):
    gate = tmp_path / "gate"
    code = """
import os, sys, time
print("first", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
print("second", flush=True)
"""
    lines: list[str] = []
    ticks: list[float] = []

    def tick(passed: float) -> None:
        ticks.append(passed)
        if lines == ["first"] and len(ticks) > 3:
            gate.touch()

    assert run(python(code, str(gate)), "test", 60, on_tick=tick, on_line=lines.append).status == 0
    assert lines == ["first", "second"]
    assert ticks == sorted(ticks)


def test_an_interrupt_ends_the_child_and_leaves_no_descriptor():
    before = set(os.listdir("/proc/self/fd"))
    lines: list[str] = []

    def interrupt(passed: float) -> None:
        if lines:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(python(FOREVER), "test", 60, on_tick=interrupt, on_line=lines.append)
    assert not is_running(int(lines[0]))
    assert set(os.listdir("/proc/self/fd")) == before


def test_the_isolated_interpreter_starts_without_site_packages():
    code = "import sys; print('site' in sys.modules, sys.flags.isolated)"
    assert run(python(code), "test", 30).output == "False 1\n"
    assert python("pass")[0] == sys.executable
    with pytest.raises(FileNotFoundError):
        run(["/no/such/program"], "test", 5)
