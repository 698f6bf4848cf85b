"""What the precision does to a run."""
