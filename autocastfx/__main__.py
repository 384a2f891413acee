"""``python -m autocastfx``."""

from __future__ import annotations

import sys

from autocastfx.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
