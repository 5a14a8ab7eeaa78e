"""What all of the broker stands on: turns, schedules, budgets, sets of numbers."""
