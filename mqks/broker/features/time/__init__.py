"""Messages and consumers that wait for a time: delays, expiry, deadlines, leases, schedules."""
