"""What a run costs: prices, the ledger and its bill, a budget, a deadline, energy, live metrics."""
