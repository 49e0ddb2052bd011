"""The table of the doctor's rules.

To add a rule, write a function in `data_rules`, `worker_rules`, `machine_rules`, `host_rules` or `learning_rules` and
list it here. Its docstring states when it applies. It takes a run and returns advice, or None if it does not apply or a
value that it needs is unknown. If two pieces of advice predict the same speed, the rule listed first wins. Each rule is
tested in `tests/monitoring/test_diagnosing_rules.py`, with a run to which it applies and similar runs to which it does
not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from colabkit.monitoring.diagnosing import data_rules, host_rules, learning_rules, machine_rules, worker_rules
from colabkit.monitoring.diagnosing.diagnosis import Advice
from colabkit.monitoring.diagnosing.run_profile import RunProfile


@dataclass(frozen=True)
class Rule:
    """A doctor rule, identified by the name of its function.

    Attributes:
        look: function that returns advice about a run, or None.
        is_urgent: whether its advice is listed before all advice about speed.
        headline: sentence that precedes the verdict if the rule gives advice. Such a rule also applies before there are
            enough steps for a verdict about speed.
        silences: names of the rules whose advice is dropped if this rule gives advice, because it would repeat or
            contradict this advice.
    """

    look: Callable[[RunProfile], Advice | None]
    is_urgent: bool = False
    headline: str = ""
    silences: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the rule's function."""
        return self.look.__name__

    def __call__(self, run: RunProfile) -> Advice | None:
        """Return the rule's advice about a run, marked with the rule's name; None if the rule does not apply."""
        advice = self.look(run)
        return None if advice is None else replace(advice, rule=self.name)


RULES = (
    Rule(learning_rules.not_finite, is_urgent=True, headline="The loss is not finite"),
    Rule(learning_rules.divergence, is_urgent=True, headline="The loss diverges", silences=("plateau",)),
    Rule(learning_rules.overfitting, is_urgent=True, headline="The model overfits"),
    Rule(learning_rules.plateau, headline="The loss no longer falls"),
    Rule(machine_rules.full_ram, is_urgent=True, silences=("more_workers", "bursts")),
    Rule(machine_rules.full_shm, is_urgent=True, silences=("more_workers", "too_many_workers", "bursts")),
    Rule(machine_rules.full_disk, is_urgent=True),
    Rule(machine_rules.costly_panel),
    Rule(
        data_rules.still_packing,
        silences=("small_files", "slow_disk", "more_workers", "bursts", "long_pauses", "slower_than_before"),
    ),
    Rule(data_rules.remote_files),
    Rule(data_rules.remote_files_to_pack),
    Rule(data_rules.small_files),
    Rule(data_rules.slow_disk),
    Rule(data_rules.slow_decoding),
    Rule(data_rules.slow_transform),
    Rule(data_rules.slow_foreign),
    Rule(worker_rules.more_workers),
    Rule(worker_rules.held_by_python, silences=("more_workers",)),
    Rule(worker_rules.too_many_workers),
    Rule(worker_rules.slow_start),
    Rule(worker_rules.bursts),
    Rule(data_rules.chunks_do_not_fit),
    Rule(data_rules.cache_too_small),
    Rule(data_rules.throttled, silences=("remote_files", "slower_than_before")),
    Rule(machine_rules.pageable_copies),
    Rule(machine_rules.slow_copies),
    Rule(machine_rules.host_work, silences=("code_beside_torch",)),
    Rule(host_rules.busy_thread, silences=("code_beside_torch", "reading_values")),
    Rule(host_rules.blocked_step),
    Rule(host_rules.straggler, silences=("blocked_step",)),
    Rule(host_rules.code_beside_torch),
    Rule(host_rules.reading_values),
    Rule(host_rules.too_many_threads, silences=("blocked_step", "others_on_the_cpu")),
    Rule(host_rules.lost_cpu),
    Rule(host_rules.long_pauses),
    Rule(host_rules.slow_checkpoints, silences=("host_work", "long_pauses")),
    Rule(host_rules.slow_validation),
    Rule(host_rules.slower_than_before),
    Rule(machine_rules.wrong_device, is_urgent=True),
    Rule(machine_rules.lost_gpu, is_urgent=True),
    Rule(machine_rules.others_on_the_cpu, silences=("blocked_step", "slower_than_before")),
    Rule(machine_rules.tiny_batches, silences=("launches", "room_on_the_gpu")),
    Rule(machine_rules.launches, silences=("room_on_the_gpu",)),
    Rule(machine_rules.no_mixed_precision),
    Rule(machine_rules.room_on_the_gpu),
    Rule(machine_rules.full_gpu, silences=("tiny_batches", "launches", "room_on_the_gpu")),
    Rule(machine_rules.slowed_gpu),
    Rule(machine_rules.others_on_the_gpu),
)
