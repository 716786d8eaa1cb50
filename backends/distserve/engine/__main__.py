"""`python -m distserve.engine --fd N`."""

from __future__ import annotations

import sys

from distserve.engine.main import main

if __name__ == "__main__":
    sys.exit(main())
