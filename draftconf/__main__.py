"""``python -m draftconf`` is ``conform`` where nothing was installed."""

import sys

from draftconf.conformance.cli import main

if __name__ == "__main__":
    sys.exit(main())
