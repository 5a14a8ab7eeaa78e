"""What a line asks for, and what is answered."""
