"""What a damaged checkpoint raises."""

from foak.core.errors import ConfigError

__all__ = ["CheckpointError"]


class CheckpointError(ConfigError):
    """A GPTQ checkpoint is damaged, or is not what its settings say; the message names the file and the tensor."""
