"""`python -m distserve_planner` is the `planner` command."""

import sys

from distserve_planner.cli import main

if __name__ == "__main__":
    sys.exit(main())
