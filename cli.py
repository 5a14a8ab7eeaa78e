"""Lets `python cli.py serve` work from a checkout; the command itself is `mqks.commands`."""

import sys

from mqks.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
