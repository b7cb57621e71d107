"""Managed parameters: what they are made of, how modules enter and leave them, and who else may hold them."""
