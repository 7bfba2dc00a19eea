"""bitsandbytes' 4-bit and 8-bit layers as the base of a LoRA."""
