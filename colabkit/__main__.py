"""`python -m colabkit` is the command `colabkit`."""

import sys

from colabkit.notebook.command_line import main

sys.exit(main())
