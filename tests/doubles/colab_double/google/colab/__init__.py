"""A fake `google.colab`: mounting Drive takes the same steps in the same order, and can fail, as in hosted Colab.

A JSON file named by `COLAB_DOUBLE` controls its behavior; see `plan` in `drive`. The fake can be imported only if
a test puts the folder `colab_double` on the path.
"""
