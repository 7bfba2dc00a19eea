"""Padding-free training and multipack: sequences laid end to end, attention that keeps them apart."""

from foak.padding_free._version import __version__

__all__ = ["__version__"]
