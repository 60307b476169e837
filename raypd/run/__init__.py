"""What lies in the folder of a run: its records, who works on it, and what is tried again."""
