"""python -m kvfold: the command line."""

import sys

from kvfold.cli import main

sys.exit(main())
