"""Many tokens per network lap for BloomBee and Petals swarms."""

__version__ = "0.1.0"
