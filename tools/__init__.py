"""What writes parts of the package from others; not in the wheel."""
