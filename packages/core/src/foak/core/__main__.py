"""`python -m foak.core` is the command `foak`, for launchers: `accelerate launch -m foak.core train RUN.yaml`."""

import sys

from foak.core.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
