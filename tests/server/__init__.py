"""The server around the broker: settings, connections, security, metrics, the clock."""
