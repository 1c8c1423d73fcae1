"""Data that released versions wrote; see README.md."""
