"""The one table of verbs and options that magics and commands are made from.

To add a magic or a command, add a row to the table in `verbs`. A value of the kind `object` is a Python object: in a
notebook the name of a variable, in a terminal `FILE.py:NAME`.
"""
