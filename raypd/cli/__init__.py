"""What is typed: the commands, their options, and what they print and return."""
