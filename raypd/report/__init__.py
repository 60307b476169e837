"""Show a run to people: its report page, its review page, and its status on the terminal.

Everything is read from the run's folder, without Ray.
"""
