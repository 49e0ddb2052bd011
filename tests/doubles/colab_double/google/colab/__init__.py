"""A double of `google.colab` for tests: its calls, their order and every error of its Drive mount.

It does what the file named by `COLAB_DOUBLE` says, a JSON object; see `plan` of `drive`. It is found only where a test
puts this folder on the path.
"""
