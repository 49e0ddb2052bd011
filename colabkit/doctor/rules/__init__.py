"""The doctor's rules, by what they look at: the input, the device and the host, safety."""

from __future__ import annotations

from colabkit.doctor.rules.device import DEVICE_RULES
from colabkit.doctor.rules.input import INPUT_RULES
from colabkit.doctor.rules.rule import Rule
from colabkit.doctor.rules.safety import SAFETY_RULES

__all__ = ["RULES", "Rule"]

RULES: tuple[Rule, ...] = (*SAFETY_RULES, *INPUT_RULES, *DEVICE_RULES)
