"""Documents to records through an engine: used by the workers, data.py, api.LLM and estimates.

No Ray.
"""
