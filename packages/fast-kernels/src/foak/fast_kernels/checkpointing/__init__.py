"""The activation budget: the last layers keep their activations, instead of computing them again, as memory allows."""
