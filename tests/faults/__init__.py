"""Faults on purpose, and every document exactly once afterwards: for pytest and for the table of
`make faults`.
"""
