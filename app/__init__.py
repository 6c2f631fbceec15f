"""The ground floor: words, places and memory that producers and workers share."""

__version__ = "0.1.0"
