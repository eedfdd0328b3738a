"""python -m kvfold: the command line."""

import sys

from kvfold.cli.main import main

sys.exit(main())
