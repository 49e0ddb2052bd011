"""The one table of verbs and options that magics and commands are made from.

Names, defaults and meanings are those of the public functions; a test compares the table with their signatures. A value
of the kind `object` is a Python object: in a notebook the name of a variable, in a terminal `FILE.py:NAME`.
"""
