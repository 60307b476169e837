"""`raypd fit`: from documents and a schema to weights, their figures, and a configuration to
run.
"""
