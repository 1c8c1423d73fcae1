"""Spark: its JVM, its session, and the queries that hand over rows."""
