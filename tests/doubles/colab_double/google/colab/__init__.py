"""A fake `google.colab` for tests: it makes the same calls in the same order, with every error of the Drive mount.

A JSON file named by `COLAB_DOUBLE` controls its behavior; see `plan` in `drive`. It can be imported only if a test puts
this folder on the path.
"""
