"""Every night the same command: what is new or changed in the input, and a table of all of it."""
