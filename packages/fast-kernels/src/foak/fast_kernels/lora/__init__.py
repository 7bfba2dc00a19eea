"""What stands in for PEFT's forward of a LoRA layer: `forward` runs it, `shared_input` joins layers on one input."""
