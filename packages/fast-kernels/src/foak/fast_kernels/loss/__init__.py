"""The loss without the logits: the head's lazy product, and who consumes it."""
