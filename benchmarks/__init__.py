"""One script per table or figure, one runner, committed results."""
