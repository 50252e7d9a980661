"""Around the path of a record, not on it: devices, checkpoints, what happens between steps, and what is printed."""
