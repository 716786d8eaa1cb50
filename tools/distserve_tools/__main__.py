"""`python -m distserve_tools` is the `distserve` command."""

import sys

from distserve_tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
