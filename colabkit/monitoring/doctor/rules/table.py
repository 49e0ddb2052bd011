"""The doctor's rules, by what they look at: the input, the device and the host, safety."""

from __future__ import annotations

from colabkit.monitoring.doctor.rules.device import DEVICE_RULES
from colabkit.monitoring.doctor.rules.input import INPUT_RULES
from colabkit.monitoring.doctor.rules.rule import Rule
from colabkit.monitoring.doctor.rules.safety import SAFETY_RULES

RULES: tuple[Rule, ...] = (*SAFETY_RULES, *INPUT_RULES, *DEVICE_RULES)
