"""The two errors that a user of foak meets: what was written is wrong, or what was asked for cannot work."""

from __future__ import annotations

__all__ = ["ConfigError", "UnsupportedError"]


class ConfigError(ValueError):
    """Something that a user wrote is wrong: a configuration file, a key, a value, or an argument.

    The message is one sentence that names the file (if there is one), the dotted key and what is allowed there.
    The command line ends with exit code 2 on it.
    """


class UnsupportedError(RuntimeError):
    """What was written is well formed, but the combination cannot work here.

    Examples are a model that DDP already wraps, a second patcher at work on the same model, or a kernel that was asked
    for by name and that nothing in the model can take. The message is one sentence that names both sides and what to
    change. The command line ends with exit code 1 on it.
    """
