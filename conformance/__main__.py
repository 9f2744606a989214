"""``python -m conformance`` is ``conform`` where nothing was installed."""

import sys

from conformance.cli import main

if __name__ == "__main__":
    sys.exit(main())
