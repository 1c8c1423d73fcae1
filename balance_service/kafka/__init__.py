"""Kafka clients, and the topics of an application."""
