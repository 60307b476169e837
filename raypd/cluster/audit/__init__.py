"""After a run: the proof that nothing is lost, what failed, trying it again, and every night's table."""
