"""`python -m mlxcel_paged`: the same as the command `mlxcel-paged`."""

import sys

from mlxcel_paged.cli.main import main

sys.exit(main())
