"""Tests of read models without broker and without JVM: a driver of one model, and a contract that each must keep."""

from balance_service.testing.contract import check_contract
from balance_service.testing.driver import Driver
from balance_service.testing.rows import Given, event, tombstone

__all__ = ["Driver", "Given", "check_contract", "event", "tombstone"]
