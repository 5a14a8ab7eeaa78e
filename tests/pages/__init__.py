"""What the documents and examples say, typed and run."""
