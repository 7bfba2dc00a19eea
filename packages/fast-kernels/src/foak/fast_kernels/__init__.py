"""foak's kernels in models: fused norms, rotary embedding, gated activations and losses, found by structure."""

from foak.fast_kernels._version import __version__

__all__ = ["__version__"]
