"""Measuring answers: public benchmarks, exact match, metrics."""
