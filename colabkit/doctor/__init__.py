"""The doctor: what is training waiting for, and what would fix it.

`diagnose()` is in `asking` and `watch()` in `watching`: they need torch, and a panel that is only loaded does not.
"""

from __future__ import annotations

from colabkit.doctor.diagnosis import Advice, Diagnosis, Shares, Verdict
from colabkit.doctor.judging import Doctor

__all__ = ["Advice", "Diagnosis", "Doctor", "Shares", "Verdict"]
