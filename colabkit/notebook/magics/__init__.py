"""Magics, made from the table in `options/verbs.py`; to add one, add a row there."""
