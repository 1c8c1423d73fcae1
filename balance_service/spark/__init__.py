"""Reads and decodes the source topics on Spark, and runs the tasks that fold them."""
