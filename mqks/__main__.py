"""Lets `python -m mqks` do what `mqks` does."""

import sys

from mqks.commands import main

if __name__ == "__main__":
    sys.exit(main())
