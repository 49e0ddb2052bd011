"""A fake `google.colab`: its Drive mount has the steps of the real one, in the same order, and can fail in every step.

A JSON file named by `COLAB_DOUBLE` controls its behavior; see `plan` in `drive`. It can be imported only if a test puts
this folder on the path.
"""
