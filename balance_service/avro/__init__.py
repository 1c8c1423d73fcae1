"""Avro: schemas, the schema registry, framed encoding."""
