"""Benchmarks and fixtures for tests: an emulated WAN, local swarms, small models, prompts. Not installed."""

import os

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # servers are forked after a tokenizer was used
