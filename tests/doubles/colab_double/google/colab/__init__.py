"""A fake `google.colab` for tests: its calls, their order and every error of its Drive mount.

A JSON file named by `COLAB_DOUBLE` controls its behavior; see `plan` in `drive`. It can be imported only if a test puts
this folder on the path.
"""
