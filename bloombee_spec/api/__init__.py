"""Text in, text out: generation on a swarm as strings, and an OpenAI-compatible HTTP service over it."""
