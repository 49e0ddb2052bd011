"""`python -m colabkit` is the command `colabkit`."""

import sys

from colabkit.notebook import main

sys.exit(main())
