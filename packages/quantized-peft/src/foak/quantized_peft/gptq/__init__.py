"""GPTQ checkpoints as the base of a LoRA."""
