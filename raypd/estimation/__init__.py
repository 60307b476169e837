"""Before a run: estimate its time and cost, and search the cheapest settings (tune)."""
