"""The doctor: what training waits for, and what would fix it.

`api` has `diagnose()` and `watch()`. A run becomes a `run_profile`; the rules that `rules` lists give advice about it,
with speeds from `forecast`; `verdict` makes a `diagnosis` of them.
"""
