"""What people look at: the report page of a run, and its state on the terminal.

Reads a run's folder, and no Ray.
"""
