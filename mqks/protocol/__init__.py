"""The wire: bytes to lines to requests, replies to bytes. Standard library only, no IO."""
