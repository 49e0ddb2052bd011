"""The doctor: what is training waiting for, and what would fix it.

`diagnose()` is in `asking` and `watch()` in `watching`: they need torch, and a panel that is only loaded does not.
"""
