"""First values: from files, from each module's own initialization, and how they come into chunks."""
