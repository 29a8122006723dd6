"""Verified, reversible changes of an installed host: strict unified diffs, and the hash of each file in each state."""
