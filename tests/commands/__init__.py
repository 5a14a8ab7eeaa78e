"""The command line, and the web page."""
