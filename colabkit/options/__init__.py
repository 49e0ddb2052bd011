"""The one table of verbs and options that magics and commands are made from.

Names, defaults and meanings are those of the public functions; a test compares the table with their signatures. A value
of the kind `object` is a Python object: in a notebook the name of a variable, in a terminal `FILE.py:NAME`.
"""

from __future__ import annotations

from colabkit.options.cells import CELLS, DASHBOARD, LOADING
from colabkit.options.parsing import RaisingParser, VerbParser, arguments_of, given_in, look_up_in, parser_of
from colabkit.options.verb import Option, Verb
from colabkit.options.verbs import VERBS
from colabkit.options.wording import in_other_words, tell_in, words_of

__all__ = [
    "CELLS",
    "DASHBOARD",
    "LOADING",
    "VERBS",
    "Option",
    "RaisingParser",
    "Verb",
    "VerbParser",
    "arguments_of",
    "given_in",
    "in_other_words",
    "look_up_in",
    "parser_of",
    "tell_in",
    "words_of",
]
