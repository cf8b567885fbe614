"""memplan's version, for every part."""

__version__ = "0.1.0"
