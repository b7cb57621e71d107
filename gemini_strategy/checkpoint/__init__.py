"""Checkpoint folders: written by all ranks at once, loaded by any number of them. Begin with save.py and load.py."""
