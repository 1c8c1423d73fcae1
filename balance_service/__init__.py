"""Live queries over Kafka-backed state: event-sourced read models on PySpark, RocksDB and HTTP.

The names that authors of read models import; see docs/how-to/read-models.md.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from balance_service.process.package import __version__ as __version__

if TYPE_CHECKING:
    from balance_service.application import Application as Application
    from balance_service.errors import ConfigurationError as ConfigurationError
    from balance_service.errors import PoisonRecordError as PoisonRecordError
    from balance_service.model.conditions import col as col
    from balance_service.model.events import ANY as ANY
    from balance_service.model.events import DEAD_LETTER as DEAD_LETTER
    from balance_service.model.events import EVENT as EVENT
    from balance_service.model.events import HALT as HALT
    from balance_service.model.events import LAST as LAST
    from balance_service.model.events import PER_KEY as PER_KEY
    from balance_service.model.events import Emit as Emit
    from balance_service.model.events import Event as Event
    from balance_service.model.events import OfState as OfState
    from balance_service.model.events import State as State
    from balance_service.model.folds import Average as Average
    from balance_service.model.folds import Count as Count
    from balance_service.model.folds import Distinct as Distinct
    from balance_service.model.folds import Earliest as Earliest
    from balance_service.model.folds import Greatest as Greatest
    from balance_service.model.folds import Latest as Latest
    from balance_service.model.folds import Least as Least
    from balance_service.model.folds import Range as Range
    from balance_service.model.folds import RunningSum as RunningSum
    from balance_service.model.folds import Top as Top
    from balance_service.model.folds import add as add
    from balance_service.model.folds import product as product
    from balance_service.model.read_model import Collection as Collection
    from balance_service.model.read_model import ReadModel as ReadModel
    from balance_service.model.read_model import Routes as Routes
    from balance_service.model.record_folds import Debezium as Debezium
    from balance_service.model.record_folds import Upsert as Upsert
    from balance_service.model.record_keys import RECORD_KEY as RECORD_KEY
    from balance_service.model.stream import Global as Global
    from balance_service.model.stream import Stream as Stream
    from balance_service.model.stream import Table as Table
    from balance_service.model.stream import days as days
    from balance_service.model.value_types import BASE64 as BASE64
    from balance_service.model.value_types import DIGITS as DIGITS
    from balance_service.model.value_types import EPOCH_DAYS as EPOCH_DAYS
    from balance_service.model.value_types import EPOCH_MICROS as EPOCH_MICROS
    from balance_service.model.value_types import EPOCH_MILLIS as EPOCH_MILLIS
    from balance_service.model.value_types import NUMERIC as NUMERIC
    from balance_service.model.value_types import scale as scale
    from balance_service.settings import Settings as Settings
    from balance_service.settings import load_settings as load_settings

_WHERE = {
    "application": ("Application",),
    "errors": ("ConfigurationError", "PoisonRecordError"),
    "model.conditions": ("col",),
    "model.events": ("ANY", "DEAD_LETTER", "EVENT", "HALT", "LAST", "PER_KEY", "Emit", "Event", "OfState", "State"),
    "model.folds": (
        *("Average", "Count", "Distinct", "Earliest", "Greatest", "Latest", "Least", "Range", "RunningSum", "Top"),
        *("add", "product"),
    ),
    "model.read_model": ("Collection", "ReadModel", "Routes"),
    "model.record_folds": ("Debezium", "Upsert"),
    "model.record_keys": ("RECORD_KEY",),
    "model.value_types": ("BASE64", "DIGITS", "EPOCH_DAYS", "EPOCH_MICROS", "EPOCH_MILLIS", "NUMERIC", "scale"),
    "model.stream": ("Global", "Stream", "Table", "days"),
    "settings": ("Settings", "load_settings"),
}
_MODULE_OF = {name: module for module, names in _WHERE.items() for name in names}
__all__ = sorted([*_MODULE_OF, "__version__"])


def __getattr__(name: str) -> Any:
    # Imported on first use: a command such as `status` needs none of them, and some take half a second to import.
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'balance_service' has no attribute '{name}'")
    return getattr(import_module(f"balance_service.{_MODULE_OF[name]}"), name)
