"""Unit tests of the formats of records."""
