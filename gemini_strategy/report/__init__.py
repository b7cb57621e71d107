"""What is told to people: tables of plans and results, and timelines of steps."""
