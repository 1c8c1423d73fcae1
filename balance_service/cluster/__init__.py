"""Membership in the group, ownership of partitions, and the directory of instances."""
