"""What is said of settings in the environment that cannot be right."""

from __future__ import annotations

import pytest

from balance_service.errors import ConfigurationError
from balance_service.settings import load_settings


def refusal(monkeypatch: pytest.MonkeyPatch, **environment: str) -> str:
    """What is said of some variables. Fails if nothing is."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigurationError) as caught:
        load_settings()
    return str(caught.value)
