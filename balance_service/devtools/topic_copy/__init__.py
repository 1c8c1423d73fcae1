"""Copying a topic to one with another partition count: the way out when a source topic's keys have moved."""
