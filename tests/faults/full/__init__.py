"""Media with no room: devices, quotas and tables that are full, at once or when it is too late."""
