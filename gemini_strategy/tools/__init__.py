"""What draws and measures for people, beside what trains: nothing here is imported before it is asked for."""
