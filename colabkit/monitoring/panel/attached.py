"""Show the panel of a run in another process, from its status file."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from colabkit.foundation import HostSnapshot, LoaderMeters, MetersSnapshot, Sampler, Screen, meters
from colabkit.monitoring.attaching import RunStatus, RunWatch
from colabkit.monitoring.diagnosing.verdict import Doctor
from colabkit.monitoring.panel.content import PanelState, Phase
from colabkit.monitoring.panel.recorder import RunRecorder
from colabkit.monitoring.panel.text import PanelFrame

if TYPE_CHECKING:
    from colabkit.training import SavedStatus

_LOOK_S = 1.0
# If the folder is on a slow mount, reading the status takes at most about this share of the time.
_SHARE = 0.2


def show_run(watch: RunWatch, screen: Screen | None, refresh_s: float) -> RunStatus:
    """Show the panel of a run until the run ends, or Ctrl-C ends the display; return the last status.

    Args:
        watch: watcher of the run's status file.
        screen: where the panel is shown; None to show nothing.
        refresh_s: seconds between frames.
    """
    doctor = Doctor()
    found, look_s = watch.look(), 0.0
    try:
        while not found.is_over:
            _paint(watch, found, doctor, screen, final=False)
            time.sleep(max(refresh_s, _LOOK_S, look_s / _SHARE))
            began_s = time.monotonic()
            found = watch.look()
            look_s = time.monotonic() - began_s
    except KeyboardInterrupt:
        # Ctrl-C ends the display, not the run.
        pass
    finally:
        _paint(watch, found, doctor, screen, final=True)
        if screen is not None:
            screen.close()
    return found


def _paint(watch: RunWatch, found: RunStatus, doctor: Doctor, screen: Screen | None, final: bool) -> None:
    if screen is not None and watch.saved is not None:
        screen.paint(PanelFrame(panel_state(watch.saved, found, doctor)), final)


def panel_state(saved: SavedStatus, found: RunStatus, doctor: Doctor) -> PanelState:
    """Return the state of the panel for a saved status.

    The run's events and measurements are passed to a `RunRecorder`, so that the panel looks as in that process.

    Args:
        saved: the saved status.
        found: the state of the run.
        doctor: doctor that diagnoses the run; the same one for all frames, so that the verdict does not flicker.
    """
    measured = saved.measured
    # Times in the status are relative to when it was written.
    clock = _StatusClock(-saved.elapsed_s)
    recorder = RunRecorder(doctor, clock)
    counts = _SavedMeters(measured.spent)
    counts.facts = measured.facts
    recorder.note(meters.RunStarted(counts, saved.epoch_count, saved.steps_per_epoch, measured.precision))
    counts.has_begun = True
    for event in _events(saved):
        recorder.note(event)
    clock.now_s = 0.0
    recorder.note(meters.StepDone(found.epoch - 1 if found.epoch else 0, saved.step, found.step or 0, saved.values))
    phase: Phase = "waiting" if saved.waiting_s >= saved.every_s else "running"
    if saved.is_over:
        phase = "finished" if saved.state == "finished" else "stopped"
        recorder.end(None if phase == "finished" else saved.reason)
    elif found.state == "dead":
        phase = "stopped"
    state = recorder.state(_SavedMachine(measured.hosts, clock), saved.cost_share)
    sentence = found.message[:1].upper() + found.message[1:]
    return replace(
        state,
        phase=phase,
        stopped_by=saved.reason or ("a kill or crash" if found.state == "dead" else None),
        remaining_s=saved.remaining_s,
        waiting_s=saved.waiting_s,
        samples_per_s=state.samples_per_s if saved.is_over or not saved.speed_curve else saved.speed_curve[-1],
        loss_curve=saved.loss_curve,
        speed_curve=saved.speed_curve,
        data_curve=saved.data_curve,
        data_bytes_per_s=saved.data_curve[-1] if saved.data_curve else None,
        queue_rate=measured.spent.queue_rate if measured.spent.queue_room else None,
        at_s=saved.written_s,
        headline="" if found.is_good else ". ".join(filter(None, [sentence, found.advice])),
    )


def _events(saved: SavedStatus) -> list[meters.Event]:
    """Return the epochs and validations of a run as events, in order."""
    found: list[meters.Event] = []
    validations, steps = [*saved.validations], 0
    for record in saved.records:
        steps += record.steps
        while validations and validations[0].step <= steps:
            one = validations.pop(0)
            found.append(meters.ValidationDone(one.step, one.values))
        found.append(meters.EpochDone(record.epoch, record.samples, record.seconds, record.wait_s, record.shown))
    return [*found, *(meters.ValidationDone(one.step, one.values) for one in validations)]


class _StatusClock:
    """A clock that returns the time of the status, in seconds relative to when it was written."""

    def __init__(self, now_s: float) -> None:
        self.now_s = now_s

    def __call__(self) -> float:
        return self.now_s


class _SavedMeters(LoaderMeters):
    """Meters that hold the counts of a saved status."""

    def __init__(self, spent: MetersSnapshot) -> None:
        super().__init__()
        self.has_begun = False
        self._saved = spent

    def snapshot(self) -> MetersSnapshot:
        return self._saved if self.has_begun else MetersSnapshot()


class _SavedMachine(Sampler):
    """A sampler that holds the host snapshots of a saved status."""

    def __init__(self, hosts: Sequence[HostSnapshot], clock: Callable[[], float]) -> None:
        super().__init__(clock=clock)
        self._recent.extend(hosts)
        self._whole.extend(hosts)
