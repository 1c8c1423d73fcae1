"""Tests read models without a broker: a driver for one model, and the contract that every model must keep.

Only a model with a `transform` needs a JVM.
"""

from balance_service.testing.contract import check_contract
from balance_service.testing.driver import Driver
from balance_service.testing.rows import InputEvent, TableRow, event, row, tombstone

__all__ = ["Driver", "InputEvent", "TableRow", "check_contract", "event", "row", "tombstone"]
