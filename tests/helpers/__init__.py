"""What several tests share: models, references, ranks, random scenarios, processes."""
