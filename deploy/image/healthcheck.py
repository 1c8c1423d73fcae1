"""Exit code 0 while the instance in this container answers at all.

Liveness, not readiness: an instance that restores its stores is not ready, and must not be restarted for it.
"""

from __future__ import annotations

import os
import urllib.request

port = os.environ.get("BALANCE_HTTP_PORT", "5051")
urllib.request.urlopen(f"http://127.0.0.1:{port}/health/live", timeout=4).close()
