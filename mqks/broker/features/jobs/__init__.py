"""Messages whose end somebody waits for: results, progress, and who is told of a cancel."""
