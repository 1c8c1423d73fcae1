"""Settings: the only reader of the environment."""

from balance_service.settings.settings import PREFIX, Settings, load_settings

__all__ = ["PREFIX", "Settings", "load_settings"]
