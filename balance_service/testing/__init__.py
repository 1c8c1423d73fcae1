"""Tests read models without a broker and a JVM: a driver for one model, and the contract that every model must keep."""

from balance_service.testing.contract import check_contract
from balance_service.testing.driver import Driver
from balance_service.testing.rows import InputEvent, TableRow, event, row, tombstone

__all__ = ["Driver", "InputEvent", "TableRow", "check_contract", "event", "row", "tombstone"]
