"""The ranks of a run: collectives for the core, and what the ranks tell each other besides."""
