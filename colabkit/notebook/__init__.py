"""Notebook: the user interfaces, namely magics, the command line, the launcher and the demo.

- `verbs`: the table of verbs and their options, shared by magics, commands, launcher and completion; `verb_types`:
  the classes of its rows; `verb_options`: the options that several verbs share.
- `options`: converts the words of a line to keyword arguments, and writes messages in the syntax of a line;
  `verb_parser`: the parser of these words.
- `lines`: parses and completes the line of a magic.
- `hints`: names the remedy of common errors below a cell.
- `magics`: line magics, and the IPython extension that registers them; `cells`: cell magics.
- `command_line`: the command `colabkit`; `shell_completion`: its completion in bash, zsh and fish.
- `launcher`: the form with buttons. `demonstration`: `demo()`. `template`: the template notebook, `write_template()`.
- `recipe`: `train_on()`, which trains on a source with one call, and its report.

To add `%hello` and `colabkit hello`, write `hello()` in the subpackage where it belongs, export it in the
`__init__.pyi` of that subpackage and in `colabkit/__init__.pyi`, and add a row `Verb("hello", ...)` to `VERBS` in
`verbs`. Help, completion and messages are derived from the row. A cell magic needs a row in `CELLS`, a function in
`cells` and an entry in `magics.cell_magics`.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
