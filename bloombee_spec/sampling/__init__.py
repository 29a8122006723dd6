"""Sampling: how logits become tokens, identically at every place that may have to decide."""
