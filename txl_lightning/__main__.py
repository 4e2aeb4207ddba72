"""`python -m txl_lightning` is `txl`."""

import sys

from txl_lightning.cli import main

if __name__ == "__main__":
    sys.exit(main())
