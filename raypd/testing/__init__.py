"""What stands in for real weights in tests and simulations."""
