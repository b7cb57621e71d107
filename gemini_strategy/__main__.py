"""`python -m gemini_strategy` is the command `gemini-strategy`."""

import sys

from gemini_strategy.cli import main

if __name__ == "__main__":
    sys.exit(main())
