"""Exits with code 0 if the instance in this container is live.

Readiness is not checked: an instance is not ready while it restores its stores, and must not be restarted then.
"""

from __future__ import annotations

import os
import ssl
import urllib.request


def main() -> None:
    """Request the health port if there is one, otherwise the HTTP port, by HTTPS if TLS is configured."""
    health_port = os.environ.get("BALANCE_HEALTH_PORT")
    port = health_port or os.environ.get("BALANCE_HTTP_PORT", "5051")
    secured = os.environ.get("BALANCE_TLS_CERTIFICATE") and not health_port
    # The certificate names the host that peers connect to; the request contains no secrets.
    context = ssl._create_unverified_context() if secured else None
    url = f"{'https' if secured else 'http'}://127.0.0.1:{port}/health/live"
    # Without the proxy of the environment, which does not apply to this machine.
    handlers = [urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)]
    urllib.request.build_opener(*handlers).open(url, timeout=4).close()


if __name__ == "__main__":
    main()
