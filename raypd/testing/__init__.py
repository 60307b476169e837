"""An engine without weights, for tests and simulations."""
