"""Notebook: what people touch.

- `options`: one table of verbs and options for magics and the command line.
- `magics`: line and cell magics; `command_line`: the command `colabkit`.
- `launcher`: `open_launcher()`, the panel with buttons.
- `demonstration`: `demo()`.

To add a magic or a command, add a row to the table in `options/verbs.py` and a public function of the same name.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
