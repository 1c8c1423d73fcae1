"""Where the HTTP server listens: what it cannot listen on is told in a sentence that names the setting."""

from __future__ import annotations

import pytest

from balance_service.errors import ConfigurationError
from balance_service.http.server.listening import bind


@pytest.mark.parametrize("host", ["a..b", ".a", "a" * 64, "ü" * 64])
def test_a_host_that_no_resolver_can_be_asked_for_is_refused(host: str) -> None:
    with pytest.raises(
        ConfigurationError, match=f"BALANCE_HTTP_HOST {host} is neither an address nor a host name; name"
    ):
        bind(host, 0)


def test_a_port_in_use_is_refused_by_its_setting() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]

        with pytest.raises(ConfigurationError, match=f"port {port} on 127.0.0.1 is in use; .* set BALANCE_HEALTH_PORT"):
            bind("127.0.0.1", port, "BALANCE_HEALTH_PORT")
