"""raypd: structured answers out of very large document collections, decoded in parallel."""

__version__ = "0.1.0"
