"""Lets `python cli.py serve` work from a checkout; the command itself is `mqks.commands`."""

import sys

from mqks.commands import main

if __name__ == "__main__":
    sys.exit(main())
