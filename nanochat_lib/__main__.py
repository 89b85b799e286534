"""`python -m nanochat_lib` is the `nanochat` command."""

import sys

from nanochat_lib.cli import main

if __name__ == "__main__":
    sys.exit(main())
