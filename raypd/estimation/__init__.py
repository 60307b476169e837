"""Before a run: what it will take and cost (estimate), and which settings are the cheapest
(tune).
"""
