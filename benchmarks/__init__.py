"""Benchmarks and fixtures for tests: an emulated WAN, local swarms, small models, prompts. Not installed."""
