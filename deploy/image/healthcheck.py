"""Exit code 0 while the instance in this container answers at all.

Liveness, not readiness: an instance that restores its stores is not ready, and must not be restarted for it.
"""

from __future__ import annotations

import os
import ssl
import urllib.request


def main() -> None:
    """Ask the port for health if there is one, otherwise the only port, by HTTPS where that is what it speaks."""
    health_port = os.environ.get("BALANCE_HEALTH_PORT")
    port = health_port or os.environ.get("BALANCE_HTTP_PORT", "5051")
    secured = os.environ.get("BALANCE_TLS_CERTIFICATE") and not health_port
    # Its certificate names the host that peers reach, not this one; and nothing is told to it.
    context = ssl._create_unverified_context() if secured else None
    url = f"{'https' if secured else 'http'}://127.0.0.1:{port}/health/live"
    # None: a proxy that the environment names is not for this machine itself.
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    urllib.request.build_opener(*handlers).open(url, timeout=4).close()


if __name__ == "__main__":
    main()
