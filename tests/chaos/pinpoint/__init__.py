"""Bugs that random faults would not find within minutes; each names the test that must find it.

Most of them need two events at the same moment, or an event that is older or larger than any in a round.
"""

from __future__ import annotations

from tests.chaos.pinpoint import engine, http, others, spark

PINPOINT_MUTATIONS = (*engine.BUGS, *spark.BUGS, *http.BUGS, *others.BUGS)
