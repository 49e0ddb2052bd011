"""`python -m colabkit` is the command `colabkit`."""

import sys

from colabkit.cli import main

sys.exit(main())
