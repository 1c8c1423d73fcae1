"""What the decoder notes of a record, for those who read its rows; apart, for they need no Spark.

A record's `cause` is null for an update to fold; anything but these two is why it is a dead letter.
"""

from __future__ import annotations

NOTE = "note"
"""The column of a record's note."""

IGNORED = "ignored"
"""The cause of a record of another type, or of one that a condition leaves out."""

UNRESOLVED = "unresolved"
"""The cause of a record whose schema is not known here yet."""
