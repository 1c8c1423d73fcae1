"""Settings from `BALANCE_*` environment variables."""

from balance_service.settings.settings import PREFIX, Settings, load_settings, unknown_variables, variable_of

__all__ = ["PREFIX", "Settings", "load_settings", "unknown_variables", "variable_of"]
