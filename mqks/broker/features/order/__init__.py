"""In which order messages are given, where it is not the order of their arrival."""
