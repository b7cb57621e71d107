"""Device memory that is not in chunks: torch's share of the budget."""
