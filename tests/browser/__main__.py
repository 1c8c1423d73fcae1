"""Tests the console in Chromium: `python -m tests.browser`. Exits with 2 if there is no Chromium."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.browser.chromium import MISSING, chromium

if __name__ == "__main__":
    if chromium() is None:
        print(MISSING, file=sys.stderr)
        sys.exit(2)
    sys.exit(pytest.main([str(Path(__file__).parent), *sys.argv[1:]]))
