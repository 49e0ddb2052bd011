"""A fake `google.colab`: mounting Drive takes the same steps in the same order, and can fail, as in hosted Colab.

A JSON file named by `COLAB_DOUBLE` controls its behavior; see `plan` in `drive`. It can be imported only if a test puts
this folder on the path.
"""
