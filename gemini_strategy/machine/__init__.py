"""What this machine is: its cores and nodes, and how fast it copies and updates."""
