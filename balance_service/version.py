"""Which release of the service this is."""

__version__ = "0.1.0"
