"""Names in the decoder's rows; in a module without Spark, because the test driver reads them too.

A record's `cause` is null if it is an update to fold. Any cause except these two makes it a dead letter.
"""

from __future__ import annotations

NOTE = "note"
"""The column with a record's note."""

IGNORED = "ignored"
"""The cause of a record that has another type or does not meet a condition."""

UNRESOLVED = "unresolved"
"""The cause of a record whose schema is not known yet."""
