"""Notebook: what people touch.

- `verbs`: the table of verbs and options, the only one for magics, commands, launcher and completion.
- `options`: a line's words to keyword arguments, and messages back to a line's words; `lines`: a magic's line.
- `magics`: line magics, and the extension that loads them; `cells`: cell magics.
- `command_line`: the command `colabkit`. `launcher`: the panel with buttons. `demonstration`: `demo()`.

To add `%hello` and `colabkit hello`: write `hello()` in the room that it belongs to, export it in the room's
`__init__.pyi` and in `colabkit/__init__.pyi`, and add a row `Verb("hello", ...)` to `VERBS` in `verbs`. Help,
completion and messages follow from the row. A magic that runs its cell stands in `CELLS` and has a function in `cells`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
