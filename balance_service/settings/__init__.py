"""Settings: the only reader of the environment."""

from balance_service.settings.settings import PREFIX, Settings, load_settings
from balance_service.settings.stage import Stage

__all__ = ["PREFIX", "Settings", "Stage", "load_settings"]
