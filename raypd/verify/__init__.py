"""After a run: the proof that nothing is lost, what failed, and trying it again."""
